"""Groups what the prompts of a log lost by cause, and measures what fixing each cause would save."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from radixkv.doctor.finding import Finding, GroupKey
from radixkv.doctor.miss_group import MissGroup, group_of, merge_groups
from radixkv.doctor.prompt_log import PromptLog
from radixkv.doctor.replay import MIN_LOST_TOKENS, CacheSize, PromptExaminer, Replay
from radixkv.planning.time_model import TimeModel


@dataclass(frozen=True, slots=True)
class LogDiagnosis:
    """The result for a log.

    Attributes:
        num_prompts: prompts of the log.
        prompt_tokens: tokens of these prompts.
        cached_tokens: tokens that were reused in the replay.
        first_prompts: prompts that reuse nothing even if nothing is evicted, and have no finding: nothing similar was
            sent before, or reusing it would have saved too little.
        groups: what prompts lost, the most expensive cause first.
        num_other_groups: number of groups whose savings were not measured, and which are not in `groups`.
        findings: what each prompt of the log lost, without `replacements`; None if nothing.
        computed_s: seconds to compute what was not reused; None without a time model.
    """

    num_prompts: int
    prompt_tokens: int
    cached_tokens: int
    first_prompts: int
    groups: tuple[MissGroup, ...]
    num_other_groups: int
    findings: tuple[Finding | None, ...]
    computed_s: float | None

    @property
    def computed_tokens(self) -> int:
        """Tokens that were not reused in the replay."""
        return self.prompt_tokens - self.cached_tokens


def diagnose(
    log: PromptLog,
    examiner: PromptExaminer,
    *,
    size: CacheSize | None = None,
    min_lost_tokens: int = MIN_LOST_TOKENS,
    max_groups: int = 10,
    times: TimeModel | None = None,
    on_prompt: Callable[[], object] | None = None,
) -> LogDiagnosis:
    """Find out why the prompts of a log are not reused, and what fixing each cause would save.

    The log is replayed once to find the causes. Then the most expensive cause is removed from all prompts that have it,
    the log is replayed again, and so on. Each replay measures what a group saves in addition to the groups before it. A
    cause may hide another one, such as a date after a random id; the hidden cause is found in the next replay.

    Args:
        log: the prompts.
        examiner: finds the cause of a difference.
        size: the cache; by default one that evicts nothing.
        min_lost_tokens: losses of fewer tokens are not reported.
        max_groups: maximum number of groups whose savings are measured, each with one replay of the log.
        times: how long prefills take; None to report no seconds.
        on_prompt: called after each replayed prompt.
    """
    size = size or CacheSize()
    fixed: list[GroupKey] = []
    groups: list[MissGroup] = []
    first = latest = _replay(log, examiner, size, fixed, min_lost_tokens, times, on_prompt)
    while len(groups) < max_groups:
        group = next((each for each in latest.groups if each.is_fixable and each.key not in fixed), None)
        if group is None:
            break
        fixed.append(group.key)
        previous = latest
        latest = _replay(log, examiner, size, fixed, min_lost_tokens, times, on_prompt)
        saved_s = None
        if previous.computed_s is not None and latest.computed_s is not None:
            saved_s = previous.computed_s - latest.computed_s
        saved_tokens = previous.computed_tokens - latest.computed_tokens
        groups.append(replace(group, saved_tokens=saved_tokens, saved_s=saved_s))
    groups += [each for each in first.groups if not each.is_fixable]
    groups.sort(key=lambda each: each.lost_tokens if each.saved_tokens is None else each.saved_tokens, reverse=True)
    num_other_groups = sum(each.is_fixable and each.key not in fixed for each in latest.groups)
    return replace(first, groups=tuple(groups), num_other_groups=num_other_groups)


def _replay(
    log: PromptLog,
    examiner: PromptExaminer,
    size: CacheSize,
    fixed: list[GroupKey],
    min_lost_tokens: int,
    times: TimeModel | None,
    on_prompt: Callable[[], object] | None,
) -> LogDiagnosis:
    """Replay the log without some causes. Returns its groups without savings; `num_other_groups` is 0."""
    prompt_tokens = cached_tokens = first_prompts = 0
    computed_s = 0.0
    groups: dict[GroupKey, MissGroup] = {}
    findings: list[Finding | None] = []
    for replayed in Replay(log, examiner, size, fixed, min_lost_tokens).run(on_prompt):
        prompt_tokens += replayed.num_tokens
        cached_tokens += replayed.cached_tokens
        first_prompts += replayed.is_first
        finding = replayed.finding
        # Replacements are not kept, since they may have many tokens.
        findings.append(None if finding is None else replace(finding, replacements=()))
        if times is not None:
            computed_s += times.prefill_s(replayed.cached_tokens, replayed.num_tokens)
        if finding is not None:
            lost_s = None
            if times is not None:
                end = min(replayed.num_tokens, replayed.cached_tokens + finding.lost_tokens)
                # Without the fixed time of a prefill, which the prompt needs even if it reuses these tokens.
                lost_s = times.prefill_s(replayed.cached_tokens, end) - times.start_s
            groups[finding.key] = merge_groups(groups.get(finding.key), group_of(finding, lost_s))
    ranked = sorted(groups.values(), key=lambda each: each.lost_tokens, reverse=True)
    return LogDiagnosis(
        num_prompts=len(log),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        first_prompts=first_prompts,
        groups=tuple(ranked),
        num_other_groups=0,
        findings=tuple(findings),
        computed_s=None if times is None else computed_s,
    )
