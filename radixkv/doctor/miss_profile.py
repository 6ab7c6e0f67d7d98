"""What the prompts of a server lost by cause, in a fixed amount of memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from radixkv.doctor.finding import Finding, GroupKey, Side
from radixkv.doctor.miss_group import MissGroup, group_of, merge_groups
from radixkv.namespace import OTHER_TENANTS

MAX_TENANTS = 512
MAX_GROUPS = 256
MAX_TENANT_GROUPS = 64
_MAX_TEXT_CHARS = 96  # of each side of a sample


class MissCounts(NamedTuple):
    """Prompts of one tenant, or of all.

    Attributes:
        prompts: prompts that were admitted; each of several completions of a prompt counts.
        prompt_tokens, cached_tokens: tokens of these prompts, and how many of them were reused.
        misses, missed_tokens: the prompts that had to compute at least 256 tokens, and what they computed.
        examined_misses, examined_tokens: the misses that were examined or whose cause the cache knew, and what they
            computed.
        first_prompts: examined misses without a cause: nothing similar was cached, or it would save too little.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    misses: int = 0
    missed_tokens: int = 0
    examined_misses: int = 0
    examined_tokens: int = 0
    first_prompts: int = 0

    def plus(self, other: MissCounts) -> MissCounts:
        """Return the sums of the numbers."""
        return MissCounts(*map(sum, zip(self, other, strict=True)))


class TenantGroup(NamedTuple):
    """Prompts of one tenant that lost tokens for one cause."""

    tenant: str
    group: MissGroup


@dataclass(frozen=True, slots=True)
class MissReport:
    """What is known about the misses of one tenant, or of all.

    Attributes:
        covered_s: seconds that the report covers.
        counts: numbers of prompts and tokens.
        groups: what the examined prompts lost, the most expensive cause first.
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


TenantMisses = tuple[str, MissCounts, list[MissGroup]]
"""The name, counts and groups of a tenant in one period."""


class MissProfile:
    """Groups the misses of a period by tenant and cause. Not thread-safe.

    Memory: about 1.5 MB, for at most 512 tenants and 256 groups. If a new group exceeds the limit, the tenant with the
    most groups loses its group with the fewest lost tokens; a tenant that has 64 groups loses one of its own.
    Tenants after the first 512 are counted together as `(others)`, without groups.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, _TenantProfile] = {}
        self._num_groups = 0

    def can_track(self, tenant: str) -> bool:
        """Whether a tenant is tracked on its own, or still can be."""
        return tenant in self._tenants or len(self._tenants) < MAX_TENANTS

    def count(self, tenant: str, counts: MissCounts) -> None:
        """Add counts of prompts of a tenant."""
        name = tenant if self.can_track(tenant) else OTHER_TENANTS
        profile = self._tenants.setdefault(name, _TenantProfile())
        profile.counts = profile.counts.plus(counts)

    def add(self, tenant: str, finding: Finding, lost_s: float | None) -> None:
        """Add what a prompt of a tenant lost. `lost_s` are the seconds to compute it; None if they are not known."""
        if not self.can_track(tenant):
            return
        profile = self._tenants.setdefault(tenant, _TenantProfile())
        group = group_of(_shorten(finding), lost_s)
        existing = profile.groups.get(group.key)
        if existing is None:
            if len(profile.groups) == MAX_TENANT_GROUPS:
                self._drop_smallest_group(profile)
            elif self._num_groups == MAX_GROUPS:
                self._drop_smallest_group(max(self._tenants.values(), key=lambda each: len(each.groups)))
            self._num_groups += 1
        profile.groups[group.key] = merge_groups(existing, group)

    def forget(self, tenant: str | None) -> None:
        """Forget everything about a tenant, or about all tenants if `tenant` is None."""
        for name in [tenant] if tenant is not None else list(self._tenants):
            profile = self._tenants.pop(name, None)
            if profile is not None:
                self._num_groups -= len(profile.groups)

    def misses_of(self, tenant: str | None) -> list[TenantMisses]:
        """Return the name, counts and groups of a tenant, or of each one if `tenant` is None.

        Complexity: O(tenants + groups).
        """
        names = [tenant] if tenant is not None else list(self._tenants)
        profiles = [(name, self._tenants[name]) for name in names if name in self._tenants]
        return [(name, profile.counts, list(profile.groups.values())) for name, profile in profiles]

    def _drop_smallest_group(self, profile: _TenantProfile) -> None:
        del profile.groups[min(profile.groups, key=lambda each: profile.groups[each].lost_tokens)]
        self._num_groups -= 1


def report_of(misses: Iterable[TenantMisses], covered_s: float, max_groups: int) -> MissReport:
    """Add up the misses of tenants in several periods, the latest period first.

    Args:
        misses: values of `MissProfile.misses_of`.
        covered_s: seconds that the periods cover.
        max_groups: maximum number of listed causes.
    """
    counts = MissCounts()
    groups: dict[tuple[str, GroupKey], MissGroup] = {}
    for name, tenant_counts, tenant_groups in misses:
        counts = counts.plus(tenant_counts)
        for group in tenant_groups:
            groups[name, group.key] = merge_groups(groups.get((name, group.key)), group)
    ranked = sorted(groups.items(), key=lambda each: each[1].lost_tokens, reverse=True)
    listed = tuple(TenantGroup(name, group) for (name, _), group in ranked[:max_groups])
    return MissReport(covered_s, counts, listed, len(ranked) - len(listed))


def _shorten(finding: Finding) -> Finding:
    """Return a finding without the parts that may take much memory, and with short texts."""
    sample = finding.sample
    if sample is not None:
        sample = replace(
            sample,
            text_before=sample.text_before[-_MAX_TEXT_CHARS:],
            prompt=_shorten_side(sample.prompt),
            earlier=_shorten_side(sample.earlier),
        )
    return replace(finding, replacements=(), namespace=None, sample=sample)


def _shorten_side(side: Side) -> Side:
    return replace(side, text=side.text[:_MAX_TEXT_CHARS], text_after=side.text_after[:_MAX_TEXT_CHARS])
