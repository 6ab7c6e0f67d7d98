"""Prompts that lost tokens for one cause."""

from __future__ import annotations

from dataclasses import dataclass, replace

from radixkv.doctor.finding import Finding, GroupKey, Sample

_MAX_SEGMENTS = 4


@dataclass(frozen=True, slots=True)
class MissGroup:
    """Prompts that lost tokens for one cause.

    Attributes:
        key: what these prompts have in common.
        num_prompts: number of prompts.
        lost_tokens: tokens that all of them together lost.
        lost_s: seconds to compute these tokens; None if they are not known.
        min_position, max_position: the range of positions at which the prompts diverge from earlier ones.
        segments: names of the segments that contain these positions, at most 4.
        sample: both sides of the first difference; None if the cause has no sides.
        is_bound: whether `lost_tokens` is only an upper bound for some of the prompts.
        is_fixable: whether the cause can be removed from the log, to measure what that saves.
        saved_tokens: tokens that are not computed in a replay of the log without this cause and without the causes
            of the groups before this one; None if the cause cannot be removed from the log, or this was not measured.
        saved_s: seconds to compute these tokens; None without a time model.
    """

    key: GroupKey
    num_prompts: int
    lost_tokens: int
    lost_s: float | None
    min_position: int
    max_position: int
    segments: tuple[str, ...] = ()
    sample: Sample | None = None
    is_bound: bool = False
    is_fixable: bool = False
    saved_tokens: int | None = None
    saved_s: float | None = None


def group_of(finding: Finding, lost_s: float | None) -> MissGroup:
    """Return a group with one finding. `lost_s` are the seconds to compute the lost tokens."""
    return MissGroup(
        finding.key,
        1,
        finding.lost_tokens,
        lost_s,
        finding.position,
        finding.position,
        (finding.segment,) if finding.segment else (),
        finding.sample,
        finding.is_bound,
        finding.is_fixable,
    )


def merge_groups(first: MissGroup | None, second: MissGroup) -> MissGroup:
    """Return a group with the prompts of two groups that have the same key; None is an empty group."""
    if first is None:
        return second
    return replace(
        first,
        num_prompts=first.num_prompts + second.num_prompts,
        lost_tokens=first.lost_tokens + second.lost_tokens,
        lost_s=None if first.lost_s is None or second.lost_s is None else first.lost_s + second.lost_s,
        min_position=min(first.min_position, second.min_position),
        max_position=max(first.max_position, second.max_position),
        segments=tuple(dict.fromkeys((*first.segments, *second.segments)))[:_MAX_SEGMENTS],
        is_bound=first.is_bound or second.is_bound,
        is_fixable=first.is_fixable or second.is_fixable,
    )
