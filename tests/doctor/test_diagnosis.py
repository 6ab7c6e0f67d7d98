"""Diagnoses of small logs whose numbers are known."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from radixkv.api.explanation import PromptSegment
from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import Retention
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.doctor.causes import MissCause
from radixkv.doctor.diagnosis import diagnose
from radixkv.doctor.examination import Examiner
from radixkv.doctor.prompt_log import LoggedPrompt, PromptLog, ReportedReuse, segment_lookup
from radixkv.doctor.replay import CacheSize
from radixkv.planning.time_model import TimeModel

from .logs import ACME, MIN_LOST_TOKENS, causes, characters, diagnose_log, log_of

SALTED = ACME._replace(salt="one")
ADAPTED = ACME._replace(adapter="lora")
OTHER = ACME._replace(tenant="other")


def text_of(seed: int, length: int = 200) -> str:
    """Return random words; the texts of two seeds have no word in common."""
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(length // 8))


IDS = ("4f2a9c1", "b07e55d", "9c3d0a2")
HEAD, TAIL, MORE = text_of(1), text_of(2), text_of(3)


def num_computed_tokens(*prompts: str) -> int:
    """Return how many tokens of some prompts a cache that never evicts computes."""
    cache, num_computed = PrefixCache(1024, 16), 0
    for each in prompts:
        with cache.lease(ACME, np.array([*map(ord, each)], "<u4").tobytes()) as lease:
            lease.commit(lease.num_tokens)
            num_computed += lease.num_tokens - lease.cached_tokens
    return num_computed


def test_a_group_counts_what_its_prompts_lose_and_where() -> None:
    diagnosis = diagnose_log(log_of(*(f"{HEAD} id: {each} {TAIL}" for each in IDS)))
    (group,) = diagnosis.groups
    assert (group.key.cause, group.key.pattern, group.num_prompts) == (MissCause.RANDOM_ID, "7 hexadecimal digits", 2)
    assert group.lost_tokens == 2 * len(TAIL)
    assert group.min_position == group.max_position == len(HEAD) + 5
    assert group.sample is not None
    assert (group.sample.prompt.text, group.sample.earlier.text) == ("b07e55d", "4f2a9c1")
    assert (group.sample.where, group.sample.earlier_where, group.sample.text_before) == (
        "log:2",
        "log:1",
        HEAD[-3:] + " id: ",
    )


def test_the_savings_of_a_group_are_the_difference_to_a_log_without_its_cause() -> None:
    prompts = [f"{HEAD} id: {each} {TAIL}" for each in IDS]
    diagnosis = diagnose_log(log_of(*prompts))
    fixed = [f"{HEAD} id: 4f2a9c1 {TAIL}"] * 3
    assert diagnosis.computed_tokens == num_computed_tokens(*prompts)
    assert diagnosis.groups[0].saved_tokens == num_computed_tokens(*prompts) - num_computed_tokens(*fixed)


def test_a_cause_that_another_one_hides_is_found_when_the_first_is_fixed() -> None:
    prompts = [f"{HEAD} id: 4f2a9c1 {TAIL} at 10:31 {MORE}", f"{HEAD} id: b07e55d {TAIL} at 10:47 {MORE}"]
    diagnosis = diagnose_log(log_of(*prompts))
    assert [each.key.cause for each in diagnosis.groups] == [MissCause.RANDOM_ID, MissCause.DATE_OR_TIME]
    assert causes(diagnosis) == [None, MissCause.RANDOM_ID]
    num_saved = num_computed_tokens(*prompts) - num_computed_tokens(*prompts[:1] * 2)
    assert sum(each.saved_tokens or 0 for each in diagnosis.groups) == num_saved


def test_two_causes_in_one_prompt_are_two_groups() -> None:
    """A random id before tools in another order is a cause of its own, and no part of the other order."""
    tools = [f'{{"name": "tool {index}", "parameters": "{text_of(index, 120)}"}}' for index in range(4)]
    orders = (tools, tools, [tools[2], *tools[:2], tools[3]])
    prompts = [f"id: {each} {HEAD} {', '.join(order)} {TAIL}" for each, order in zip(IDS, orders, strict=True)]
    diagnosis = diagnose_log(log_of(*prompts))
    assert [(each.key.cause, each.key.pattern) for each in diagnosis.groups] == [
        (MissCause.RANDOM_ID, "7 hexadecimal digits"),
        (MissCause.REORDERED, "tools"),
    ]
    num_saved = num_computed_tokens(*prompts) - num_computed_tokens(*prompts[:1] * 3)
    assert sum(each.saved_tokens or 0 for each in diagnosis.groups) == num_saved


def test_several_differences_of_one_cause_are_one_finding() -> None:
    lines = [text_of(seed) for seed in range(4)]
    prompts = ["".join(f"[{hour}:{minute:02}] {line}" for minute, line in enumerate(lines)) for hour in (10, 11)]
    diagnosis = diagnose_log(log_of(*prompts))
    (group,) = diagnosis.groups
    assert group.key.cause is MissCause.DATE_OR_TIME
    assert group.lost_tokens >= sum(map(len, lines))
    assert group.saved_tokens == num_computed_tokens(*prompts) - num_computed_tokens(prompts[0], prompts[0])


def test_prompts_that_reuse_all_that_they_have_in_common_lose_nothing() -> None:
    diagnosis = diagnose_log(log_of(HEAD, HEAD + TAIL, HEAD + MORE, HEAD + TAIL + text_of(4)))
    assert (diagnosis.groups, diagnosis.first_prompts, causes(diagnosis)) == ((), 1, [None] * 4)


@pytest.mark.parametrize(("length", "cause"), [(MIN_LOST_TOKENS - 8, None), (MIN_LOST_TOKENS + 8, MissCause.RANDOM_ID)])
def test_small_losses_are_not_reported(length: int, cause: MissCause | None) -> None:
    tail = text_of(4)[:length]
    assert causes(diagnose_log(log_of(*(f"{HEAD} {each} {tail}" for each in ("4f2a9c1", "b07e55d")))))[1] is cause


def test_an_earlier_prompt_is_found_whatever_was_sent_since() -> None:
    """The second prompt, of another conversation, has the beginning of the third one and nothing else of it."""
    first, other = f"date: 2026-11-05 {HEAD}{TAIL}", f"date: 2026-11-06 {HEAD}{MORE}"
    diagnosis = diagnose_log(log_of(first, other, f"date: 2026-11-06 {HEAD}{TAIL}"))
    assert causes(diagnosis) == [None, MissCause.DATE_OR_TIME, MissCause.DATE_OR_TIME]
    assert diagnosis.findings[2] is not None
    assert diagnosis.findings[2].lost_tokens >= len(TAIL) - 1


@pytest.mark.parametrize(
    ("other_namespace", "cause"),
    [(SALTED, MissCause.SALT_CHANGED), (ADAPTED, MissCause.ADAPTER_CHANGED), (OTHER, MissCause.TENANT_CHANGED)],
)
def test_tokens_that_are_cached_in_another_namespace_are_lost(other_namespace: object, cause: MissCause) -> None:
    log = log_of((HEAD + TAIL, ACME), (HEAD + TAIL + MORE, other_namespace))  # type: ignore[arg-type]
    diagnosis = diagnose_log(log)
    (group,) = diagnosis.groups
    assert group.key.cause is cause
    assert group.lost_tokens == group.saved_tokens == len(HEAD + TAIL)


def test_a_difference_in_the_own_namespace_wins_if_it_costs_more() -> None:
    diagnosis = diagnose_log(
        log_of((f"{HEAD}{TAIL} 4f2a9c1 {MORE}", ACME), (HEAD + MORE, SALTED), (f"{HEAD}{TAIL} b07e55d {MORE}", ACME))
    )
    assert causes(diagnosis) == [None, MissCause.SALT_CHANGED, MissCause.RANDOM_ID]


def test_a_smaller_loss_to_another_namespace_does_not_hide_a_difference() -> None:
    prompts = (f"id: 4f2a9c1 {HEAD}{TAIL}{MORE}", f"id: b07e55d {HEAD}", f"id: b07e55d {HEAD}{TAIL}{MORE}")
    diagnosis = diagnose_log(log_of(*zip(prompts, (ACME, SALTED, ACME), strict=True)))
    assert causes(diagnosis) == [None, None, MissCause.RANDOM_ID]


def test_of_several_earlier_prompts_the_most_similar_one_decides() -> None:
    diagnosis = diagnose_log(log_of(f"{HEAD} 4f2a9c1 {TAIL}{MORE}", f"{HEAD} {TAIL}", f"{HEAD} b07e55d {TAIL}{MORE}"))
    assert causes(diagnosis)[2] is MissCause.RANDOM_ID
    assert diagnosis.findings[2] is not None
    assert diagnosis.findings[2].lost_tokens == len(TAIL + MORE)


def test_a_prompt_with_the_same_fault_does_not_hide_what_the_fault_is() -> None:
    """The second and the third prompt have different messages in a place where the first one has none."""
    messages = ["", f"The user opened {text_of(5, 64)}. ", f"The user opened {text_of(6, 64)}. "]
    diagnosis = diagnose_log(log_of(*(HEAD + each + TAIL + MORE for each in messages)))
    assert causes(diagnosis) == [None, MissCause.MESSAGE_INSERTED, MissCause.MESSAGE_INSERTED]


def test_tools_in_another_order_are_lost_with_all_that_follows_them() -> None:
    tools = [f'{{"name": "tool {index}", "parameters": "{text_of(index, 120)}"}}' for index in range(4)]
    prompts = [f"{HEAD} {', '.join(order)} {TAIL}" for order in (tools, [tools[1], tools[0], *tools[2:]])]
    (group,) = diagnose_log(log_of(*prompts)).groups
    assert group.key.cause is MissCause.REORDERED
    assert group.lost_tokens == group.saved_tokens == len(prompts[1]) - 1 - group.min_position


def test_segments_name_the_place_and_separate_groups() -> None:
    with PromptLog() as log:
        for name in ("4f2a9c1", "b07e55d"):
            for part in ("system", "tools"):
                ids = [ord(each) for each in f"{part} {name} {HEAD if part == 'system' else TAIL}"]
                segments = segment_lookup([PromptSegment("message 1 (user)" if part == "tools" else part, len(ids))])
                log.add(LoggedPrompt("log", len(ids), ACME, segment_of=segments), ids)
        diagnosis = diagnose(log, Examiner(characters), min_lost_tokens=MIN_LOST_TOKENS)
    assert {(each.key.place, each.segments) for each in diagnosis.groups} == {
        ("system", ("system",)),
        ("message (user)", ("message 1 (user)",)),
    }


def test_evictions_are_attributed_to_the_tenant_itself_or_to_others() -> None:
    texts = [text_of(seed, 128) for seed in range(10)]
    size = CacheSize(capacity_tokens=4 * 128, block_size=16, policy="lru", probation_share=1.0)
    log = log_of(texts[0], *texts[1:5], texts[0], *((each, OTHER) for each in texts[5:9]), texts[0])
    diagnosis = diagnose_log(log, size=size)
    assert causes(diagnosis) == [*[None] * 5, MissCause.EVICTED_BY_OWN, *[None] * 4, MissCause.EVICTED_BY_OTHERS]
    assert {each.key.cause: each.saved_tokens for each in diagnosis.groups} == {
        MissCause.EVICTED_BY_OWN: None,
        MissCause.EVICTED_BY_OTHERS: None,
    }
    unbounded = diagnose_log(log_of(texts[0], *texts[1:5], texts[0], texts[0]))
    assert unbounded.groups == ()


def test_an_expired_retention_is_the_cause_of_a_miss() -> None:
    texts = [text_of(seed, 128) for seed in range(8)]
    size = CacheSize(capacity_tokens=4 * 128, block_size=16, policy="lru", probation_share=1.0)
    with log_of(*texts, texts[0]) as log:
        log.prompts[0] = dataclasses.replace(log.prompts[0], retention=Retention(80, ttl_s=1.0))
        diagnosis = diagnose(log, Examiner(characters), min_lost_tokens=MIN_LOST_TOKENS, size=size)
    assert causes(diagnosis) == [*[None] * 8, MissCause.EXPIRED]


@pytest.mark.parametrize("reason", ["EVICTED", "EXPIRED", "NO_WINDOW", "NO_STATE", "NOT_LOADED", "READ_DISABLED"])
def test_the_miss_reason_that_a_server_reported_is_the_cause(reason: str) -> None:
    with log_of(HEAD, HEAD + TAIL, HEAD + TAIL + MORE) as log:
        log.prompts[1] = dataclasses.replace(log.prompts[1], reported=ReportedReuse(16, MissReason(reason)))
        log.prompts[2] = dataclasses.replace(
            log.prompts[2], reported=ReportedReuse(len(HEAD + TAIL), MissReason.DIVERGED)
        )
        diagnosis = diagnose(log, Examiner(characters), min_lost_tokens=MIN_LOST_TOKENS)
    assert causes(diagnosis) == [None, MissCause(reason), None]
    assert diagnosis.groups[0].lost_tokens == len(HEAD) - 16


def test_seconds_are_estimated_by_the_time_model() -> None:
    times = TimeModel(token_bytes=1, token_s=0.5)
    diagnosis = diagnose_log(log_of(*(f"{HEAD} id: {each} {TAIL}" for each in ("4f2a9c1", "b07e55d"))), times=times)
    (group,) = diagnosis.groups
    assert diagnosis.computed_s == diagnosis.computed_tokens * 0.5
    assert (group.lost_s, group.saved_s) == (group.lost_tokens * 0.5, (group.saved_tokens or 0) * 0.5)


def test_groups_beyond_the_maximum_are_only_counted() -> None:
    prompts = [f"{HEAD} id: 4f2a9c1 {TAIL} at 10:31 {MORE}", f"{HEAD} id: b07e55d {TAIL} at 10:47 {MORE}"]
    diagnosis = diagnose_log(log_of(*prompts), max_groups=1)
    assert [each.key.cause for each in diagnosis.groups] == [MissCause.RANDOM_ID]
    assert diagnosis.num_other_groups == 1


def test_answers_are_cached_with_their_prompts() -> None:
    with PromptLog() as log:
        for text, answer in ((HEAD, TAIL), (HEAD + TAIL + MORE, "")):
            log.add(LoggedPrompt("log", len(text), ACME), [*map(ord, text)], [*map(ord, answer)])
        diagnosis = diagnose(log, Examiner(characters), min_lost_tokens=MIN_LOST_TOKENS)
    assert diagnosis.cached_tokens == len(HEAD + TAIL)
    assert diagnosis.groups == ()
