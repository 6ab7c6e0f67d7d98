"""What a tenant used of the cache in a period, as statements list it."""

from __future__ import annotations

import datetime
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from radixkv.errors import InvalidRequest

MAX_DAYS = 400  # maximum number of days that a server keeps, and that one statement spans
DAY_S = 86_400

_MONTH = re.compile(r"[0-9]{4}-[0-9]{2}")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class Use(NamedTuple):
    """What a tenant used. Every number can be added up over days, tenants and servers.

    Attributes:
        requests: requests that ended after their first token, whatever their outcome.
        computed_tokens: prompt tokens that were computed, also for requests that were aborted before their first token.
            Tokens that were computed again after a preemption are not counted.
        generated_tokens: tokens that were sampled.
        written_tokens: tokens that requests published on the device.
        device_hit_tokens, host_hit_tokens, disk_hit_tokens, remote_hit_tokens: prompt tokens that were not computed,
            because they were cached on the device, in host memory, on disk or remotely. Remote sources are other
            servers, and all stores except host memory and disk.
        host_loaded_tokens, disk_loaded_tokens, remote_loaded_tokens: tokens that were copied from host memory, disk or
            a remote source to the device, for requests or ahead of them.
        device_evicted_by_self_tokens, host_evicted_by_self_tokens, disk_evicted_by_self_tokens: blocks of the tenant
            that were evicted to make room for its other blocks, or on its request; in tokens, as whole blocks.
        device_evicted_by_others_tokens, host_evicted_by_others_tokens, disk_evicted_by_others_tokens: blocks of the
            tenant that were evicted for other tenants.
        device_token_s, host_token_s, disk_token_s, remote_token_s: token slots of its blocks, times the seconds for
            which the blocks were there. On the device, blocks of running requests and of held leases are included. In
            shared stores, only blocks that the server knows of are included.
        more_hit_tokens_at_twice_ceiling: an estimate of the prompt tokens that were computed, and would not have been
            if the tenant had twice its ceiling. 0 for tenants without a ceiling of their own.
    """

    requests: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    written_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    remote_hit_tokens: int = 0
    host_loaded_tokens: int = 0
    disk_loaded_tokens: int = 0
    remote_loaded_tokens: int = 0
    device_evicted_by_self_tokens: int = 0
    device_evicted_by_others_tokens: int = 0
    host_evicted_by_self_tokens: int = 0
    host_evicted_by_others_tokens: int = 0
    disk_evicted_by_self_tokens: int = 0
    disk_evicted_by_others_tokens: int = 0
    device_token_s: float = 0.0
    host_token_s: float = 0.0
    disk_token_s: float = 0.0
    remote_token_s: float = 0.0
    more_hit_tokens_at_twice_ceiling: int = 0

    def plus(self, other: Use) -> Use:
        """Return the sum of both uses.

        >>> Use(requests=1).plus(Use(requests=2, host_token_s=0.5)) == Use(requests=3, host_token_s=0.5)
        True
        """
        return Use(*map(operator.add, self, other))


class DayUse(NamedTuple):
    """What tenants used on one day.

    Attributes:
        covered_s: seconds of the day that were accounted; the server did not run in the others.
        tenants: the use of each tenant that used anything.
    """

    covered_s: float
    tenants: Mapping[str, Use]


class StatementLine(NamedTuple):
    """What one tenant used in one period.

    Attributes:
        period: a month, `YYYY-MM`, or a day, `YYYY-MM-DD`, in UTC.
        tenant: the tenant.
        use: its use.
    """

    period: str
    tenant: str
    use: Use


class Statement(NamedTuple):
    """What tenants used in a range of days.

    Attributes:
        days: the range.
        covered_s: seconds of the range that were accounted.
        lines: one line for each period and tenant that used anything, in the order of periods and names.
    """

    days: DayRange
    covered_s: float
    lines: tuple[StatementLine, ...]


@dataclass(frozen=True, slots=True)
class DayRange:
    """Consecutive days in UTC.

    Attributes:
        first: the first day, as days since 1970-01-01.
        end: the day after the last one; above `first`.
    """

    first: int
    end: int

    @classmethod
    def read(cls, since: str, until: str, today: int) -> DayRange:
        """Parse two days, `YYYY-MM-DD`, or months, `YYYY-MM`, which mean their first and their last day.

        Args:
            since: the first day; empty for the first day of the month of the last day.
            until: the last day; empty for today.
            today: the present day, as days since 1970-01-01.

        Raises:
            InvalidRequest: a day is malformed or does not exist, or the range is empty or has more than 400 days.

        >>> DayRange.read("2026-11", "2026-11", today=20_785) == DayRange.read("2026-11-01", "2026-11-30", today=0)
        True
        """
        last = today if not until else _parse_day("until", until, is_last=True)
        first = _parse_day("since", since) if since else _first_of_month(last)
        if not first <= last < first + MAX_DAYS:
            raise InvalidRequest(
                f"since, until: expected 1 to {MAX_DAYS} days, the last of which is not before the first, got "
                f"{day_name(first)} to {day_name(last)}"
            )
        return cls(first, last + 1)

    def __len__(self) -> int:
        return self.end - self.first


def day_name(day: int) -> str:
    """Return the name of a day, given in days since 1970-01-01.

    >>> day_name(20_785)
    '2026-11-28'
    """
    return _date(day).isoformat()


def day_number(name: str) -> int:
    """Return the number of days since 1970-01-01 of a day, `YYYY-MM-DD`.

    Raises:
        ValueError: it is malformed, or does not exist.
    """
    if not _DAY.fullmatch(name):
        raise ValueError(f"expected a day, YYYY-MM-DD, got {name[:40]!r}")
    return (datetime.date.fromisoformat(name) - datetime.date(1970, 1, 1)).days


def month_name(day: int) -> str:
    """Return the name of the month of a day.

    >>> month_name(20_785)
    '2026-11'
    """
    return day_name(day)[:7]


def _parse_day(field: str, name: str, *, is_last: bool = False) -> int:
    """Return the day that a field names. A month counts as its first day or, with `is_last`, as its last one."""
    try:
        if not _MONTH.fullmatch(name):
            return day_number(name)
        first = day_number(f"{name}-01")
        return _first_of_month(first + 31) - 1 if is_last else first  # `first + 31` is always in the next month
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{field}: expected a day such as 2026-11-28, or a month such as 2026-11, got {name[:40]!r}"
        ) from None


def _first_of_month(day: int) -> int:
    return day - _date(day).day + 1


def _date(day: int) -> datetime.date:
    return datetime.date(1970, 1, 1) + datetime.timedelta(days=day)
