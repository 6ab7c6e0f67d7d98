"""What the prompts of a server lost by cause, in a fixed amount of memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

from radixkv.doctor.finding import Finding, GroupKey, Side
from radixkv.doctor.miss_group import MissGroup, group_of, summed
from radixkv.namespace import OTHER_TENANTS

MAX_TENANTS = 512
MAX_GROUPS = 512
MAX_TENANT_GROUPS = 64
_MAX_TEXT_CHARS = 96  # of each side of a sample


@dataclass(slots=True)
class MissCounts:
    """Prompts of one tenant, or of all.

    Attributes:
        prompts: prompts that were admitted.
        prompt_tokens, cached_tokens: their tokens, and those of them that were reused.
        misses, missed_tokens: the prompts that had to compute enough to be examined, and what they computed.
        examined_misses, examined_tokens: those of the misses whose cause was looked for.
        first_prompts: examined misses for which nothing similar was found in the cache.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    misses: int = 0
    missed_tokens: int = 0
    examined_misses: int = 0
    examined_tokens: int = 0
    first_prompts: int = 0

    def add(self, other: MissCounts) -> None:
        """Add the numbers of other prompts."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class TenantGroup(NamedTuple):
    """Prompts of one tenant that lost tokens for one cause."""

    tenant: str
    group: MissGroup


@dataclass(frozen=True, slots=True)
class MissReport:
    """What is known about the misses of one tenant, or of all.

    Attributes:
        covered_s: seconds that the report covers.
        counts: its prompts.
        groups: what the examined ones lost, the most expensive cause first.
        num_other_groups: causes that are not in `groups`.
    """

    covered_s: float
    counts: MissCounts
    groups: tuple[TenantGroup, ...]
    num_other_groups: int


@dataclass(slots=True)
class _TenantProfile:
    counts: MissCounts = field(default_factory=MissCounts)
    groups: dict[GroupKey, MissGroup] = field(default_factory=dict)


class MissProfile:
    """Groups the misses of a period by tenant and cause. Not thread-safe.

    Memory: about 2 MB, for at most 512 tenants and 512 groups, of which one tenant has at most 64. A new group takes
    the place of the one with the least lost tokens; of the same tenant if that has 64 groups, and otherwise of the
    tenant that has most of them. Further tenants are counted as `(others)`, without groups.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantProfile] = {}
        self._num_groups = 0

    def count(self, tenant: str, more: MissCounts) -> None:
        """Count prompts of a tenant."""
        self._of(tenant).counts.add(more)

    def add(self, tenant: str, finding: Finding, lost_s: float | None) -> None:
        """Add what a prompt of a tenant lost, and the seconds to compute that; None if they are not known."""
        profile = self._of(tenant)
        if self._tenants.get(tenant) is not profile:
            return
        group = group_of(_shortened(finding), lost_s)
        known = profile.groups.get(group.key)
        if known is None:
            if len(profile.groups) == MAX_TENANT_GROUPS:
                self._drop_least(profile)
            elif self._num_groups == MAX_GROUPS:
                self._drop_least(max(self._tenants.values(), key=lambda each: len(each.groups)))
            self._num_groups += 1
        profile.groups[group.key] = summed(known, group)

    def knows(self, tenant: str) -> bool:
        """Whether anything is known about a tenant."""
        return tenant in self._tenants

    def forget(self, tenant: str) -> None:
        """Forget everything about a tenant."""
        profile = self._tenants.pop(tenant, None)
        if profile is not None:
            self._num_groups -= len(profile.groups)

    def counts(self, tenant: str | None) -> MissCounts:
        """Return the numbers of a tenant; of all tenants with None."""
        total = MissCounts()
        for _, profile in self._chosen(tenant):
            total.add(profile.counts)
        return total

    def groups(self, tenant: str | None) -> Iterable[TenantGroup]:
        """List the groups of a tenant; of all tenants with None."""
        return [TenantGroup(name, group) for name, profile in self._chosen(tenant) for group in profile.groups.values()]

    def _chosen(self, tenant: str | None) -> Iterable[tuple[str, _TenantProfile]]:
        if tenant is None:
            return self._tenants.items()
        return [(tenant, self._tenants[tenant])] if tenant in self._tenants else ()

    def _of(self, tenant: str) -> _TenantProfile:
        profile = self._tenants.get(tenant)
        if profile is None:
            is_full = len(self._tenants) >= MAX_TENANTS
            profile = self._tenants.setdefault(OTHER_TENANTS if is_full else tenant, _TenantProfile())
        return profile

    def _drop_least(self, profile: _TenantProfile) -> None:
        del profile.groups[min(profile.groups, key=lambda each: profile.groups[each].lost_tokens)]
        self._num_groups -= 1


def report_of(profiles: Iterable[MissProfile], covered_s: float, tenant: str | None, max_groups: int) -> MissReport:
    """Add up the profiles of several periods, the latest first.

    Args:
        profiles: the profiles.
        covered_s: seconds that they cover.
        tenant: the tenant whose misses are reported; None for all tenants.
        max_groups: causes that are listed at most.
    """
    counts = MissCounts()
    groups: dict[tuple[str, GroupKey], MissGroup] = {}
    for profile in profiles:
        counts.add(profile.counts(tenant))
        for name, group in profile.groups(tenant):
            groups[name, group.key] = summed(groups.get((name, group.key)), group)
    ranked = sorted(groups.items(), key=lambda each: each[1].lost_tokens, reverse=True)
    listed = tuple(TenantGroup(name, group) for (name, _), group in ranked[:max_groups])
    return MissReport(covered_s, counts, listed, len(ranked) - len(listed))


def _shortened(finding: Finding) -> Finding:
    """Return a finding without what may take much memory."""
    sample = finding.sample
    if sample is not None:
        sample = replace(
            sample,
            text_before=sample.text_before[-_MAX_TEXT_CHARS:],
            prompt=_shortened_side(sample.prompt),
            earlier=_shortened_side(sample.earlier),
        )
    return replace(finding, replacements=(), namespace=None, sample=sample)


def _shortened_side(side: Side) -> Side:
    return replace(side, text=side.text[:_MAX_TEXT_CHARS], text_after=side.text_after[:_MAX_TEXT_CHARS])
