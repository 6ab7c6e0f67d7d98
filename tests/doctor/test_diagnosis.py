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

from .logs import ACME, MIN_LOST_TOKENS, causes, characters, diagnosed, log_of

SALTED = ACME._replace(salt="one")
ADAPTED = ACME._replace(adapter="lora")
OTHER = ACME._replace(tenant="other")


def text_of(seed: int, length: int = 200) -> str:
    """Return random words, of which no two texts have the same."""
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(length // 8))


IDS = ("4f2a9c1", "b07e55d", "9c3d0a2")
HEAD, TAIL, MORE = text_of(1), text_of(2), text_of(3)


def computed_of(*prompts: str) -> int:
    """Return how many tokens of some prompts a cache that never evicts computes."""
    cache, computed = PrefixCache(1024, 16), 0
    for each in prompts:
        with cache.lease(ACME, np.array([*map(ord, each)], "<u4").tobytes()) as lease:
            lease.commit(lease.num_tokens)
            computed += lease.num_tokens - lease.cached_tokens
    return computed


def test_a_group_counts_what_its_prompts_lose_and_where() -> None:
    found = diagnosed(log_of(*(f"{HEAD} id: {each} {TAIL}" for each in IDS)))
    (group,) = found.groups
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


def test_what_is_saved_is_the_difference_to_a_log_without_the_cause() -> None:
    prompts = [f"{HEAD} id: {each} {TAIL}" for each in IDS]
    found = diagnosed(log_of(*prompts))
    fixed = [f"{HEAD} id: 4f2a9c1 {TAIL}"] * 3
    assert found.computed_tokens == computed_of(*prompts)
    assert found.groups[0].saved_tokens == computed_of(*prompts) - computed_of(*fixed)


def test_a_cause_that_another_one_hides_is_found_when_the_first_is_fixed() -> None:
    prompts = [
        f"{HEAD} id: {one} {TAIL} at {other} {MORE}" for one, other in (("4f2a9c1", "10:31"), ("b07e55d", "10:47"))
    ]
    found = diagnosed(log_of(*prompts))
    assert [each.key.cause for each in found.groups] == [MissCause.RANDOM_ID, MissCause.DATE_OR_TIME]
    assert causes(found) == [None, MissCause.RANDOM_ID]
    assert sum(each.saved_tokens or 0 for each in found.groups) == computed_of(*prompts) - computed_of(*prompts[:1] * 2)


def test_two_causes_in_one_prompt_are_two_groups() -> None:
    """Tools in another order after a random id do not make the id a part of what is in another order."""
    tools = [f'{{"name": "tool {index}", "parameters": "{text_of(index, 120)}"}}' for index in range(4)]
    orders = (tools, tools, [tools[2], *tools[:2], tools[3]])
    prompts = [f"id: {each} {HEAD} {', '.join(order)} {TAIL}" for each, order in zip(IDS, orders, strict=True)]
    found = diagnosed(log_of(*prompts))
    assert [(each.key.cause, each.key.pattern) for each in found.groups] == [
        (MissCause.RANDOM_ID, "7 hexadecimal digits"),
        (MissCause.REORDERED, "tools"),
    ]
    assert sum(each.saved_tokens or 0 for each in found.groups) == computed_of(*prompts) - computed_of(*prompts[:1] * 3)


def test_several_differences_of_one_cause_are_one_finding() -> None:
    parts = [text_of(seed) for seed in range(4)]
    prompts = ["".join(f"[{hour}:{index:02}] {part}" for index, part in enumerate(parts)) for hour in (10, 11)]
    found = diagnosed(log_of(*prompts))
    (group,) = found.groups
    assert group.key.cause is MissCause.DATE_OR_TIME
    assert group.lost_tokens >= sum(map(len, parts))
    assert group.saved_tokens == computed_of(*prompts) - computed_of(prompts[0], prompts[0])


def test_prompts_that_reuse_all_that_they_have_in_common_lose_nothing() -> None:
    found = diagnosed(log_of(HEAD, HEAD + TAIL, HEAD + MORE, HEAD + TAIL + text_of(4)))
    assert (found.groups, found.first_prompts, causes(found)) == ((), 1, [None] * 4)


@pytest.mark.parametrize(("length", "cause"), [(MIN_LOST_TOKENS - 8, None), (MIN_LOST_TOKENS + 8, MissCause.RANDOM_ID)])
def test_small_losses_are_not_reported(length: int, cause: MissCause | None) -> None:
    tail = text_of(4)[:length]
    assert causes(diagnosed(log_of(*(f"{HEAD} {each} {tail}" for each in ("4f2a9c1", "b07e55d")))))[1] is cause


def test_an_earlier_prompt_is_found_whatever_was_sent_since() -> None:
    """The prompt of another session shares more of the beginning, but nothing of the conversation."""
    first, other = f"date: 2026-11-05 {HEAD}{TAIL}", f"date: 2026-11-06 {HEAD}{MORE}"
    found = diagnosed(log_of(first, other, f"date: 2026-11-06 {HEAD}{TAIL}"))
    assert causes(found) == [None, MissCause.DATE_OR_TIME, MissCause.DATE_OR_TIME]
    assert found.findings[2] is not None
    assert found.findings[2].lost_tokens >= len(TAIL) - 1


@pytest.mark.parametrize(
    ("other", "cause"),
    [(SALTED, MissCause.SALT_CHANGED), (ADAPTED, MissCause.ADAPTER_CHANGED), (OTHER, MissCause.TENANT_CHANGED)],
)
def test_the_same_tokens_under_another_name(other: object, cause: MissCause) -> None:
    found = diagnosed(log_of((HEAD + TAIL, ACME), (HEAD + TAIL + MORE, other)))  # type: ignore[arg-type]
    (group,) = found.groups
    assert group.key.cause is cause
    assert group.lost_tokens == group.saved_tokens == len(HEAD + TAIL)


def test_a_difference_in_the_own_namespace_wins_if_it_costs_more() -> None:
    found = diagnosed(
        log_of((f"{HEAD}{TAIL} 4f2a9c1 {MORE}", ACME), (HEAD + MORE, SALTED), (f"{HEAD}{TAIL} b07e55d {MORE}", ACME))
    )
    assert causes(found) == [None, MissCause.SALT_CHANGED, MissCause.RANDOM_ID]


def test_a_smaller_loss_to_another_namespace_does_not_hide_a_difference() -> None:
    prompts = (f"id: 4f2a9c1 {HEAD}{TAIL}{MORE}", f"id: b07e55d {HEAD}", f"id: b07e55d {HEAD}{TAIL}{MORE}")
    found = diagnosed(log_of(*zip(prompts, (ACME, SALTED, ACME), strict=True)))
    assert causes(found) == [None, None, MissCause.RANDOM_ID]


def test_of_several_earlier_prompts_the_most_similar_one_decides() -> None:
    found = diagnosed(log_of(f"{HEAD} 4f2a9c1 {TAIL}{MORE}", f"{HEAD} {TAIL}", f"{HEAD} b07e55d {TAIL}{MORE}"))
    assert causes(found)[2] is MissCause.RANDOM_ID
    assert found.findings[2] is not None
    assert found.findings[2].lost_tokens == len(TAIL + MORE)


def test_a_prompt_with_the_same_fault_does_not_hide_what_the_fault_is() -> None:
    """The second and the third prompt have another message in the same place, which the first one has not."""
    messages = ["", f"The user opened {text_of(5, 64)}. ", f"The user opened {text_of(6, 64)}. "]
    found = diagnosed(log_of(*(HEAD + each + TAIL + MORE for each in messages)))
    assert causes(found) == [None, MissCause.MESSAGE_INSERTED, MissCause.MESSAGE_INSERTED]


def test_parts_in_another_order_are_lost_with_what_follows_them() -> None:
    tools = [f'{{"name": "tool {index}", "parameters": "{text_of(index, 120)}"}}' for index in range(4)]
    prompts = [f"{HEAD} {', '.join(order)} {TAIL}" for order in (tools, [tools[1], tools[0], *tools[2:]])]
    (group,) = diagnosed(log_of(*prompts)).groups
    assert group.key.cause is MissCause.REORDERED
    assert group.lost_tokens == group.saved_tokens == len(prompts[1]) - 1 - group.min_position


def test_segments_name_the_place_and_separate_groups() -> None:
    with PromptLog() as log:
        for name in ("4f2a9c1", "b07e55d"):
            for part in ("system", "tools"):
                ids = [ord(each) for each in f"{part} {name} {HEAD if part == 'system' else TAIL}"]
                segments = segment_lookup([PromptSegment("message 1 (user)" if part == "tools" else part, len(ids))])
                log.add(LoggedPrompt("log", len(ids), ACME, segment_of=segments), ids)
        found = diagnose(log, Examiner(characters), min_lost_tokens=MIN_LOST_TOKENS)
    assert {(each.key.place, each.segments) for each in found.groups} == {
        ("system", ("system",)),
        ("message (user)", ("message 1 (user)",)),
    }


def test_evictions_are_attributed_to_the_tenant_itself_or_to_others() -> None:
    blocks = [text_of(seed, 128) for seed in range(10)]
    size = CacheSize(capacity_tokens=4 * 128, block_size=16, policy="lru", probation_share=1.0)
    log = log_of(blocks[0], *blocks[1:5], blocks[0], *((each, OTHER) for each in blocks[5:9]), blocks[0])
    found = diagnosed(log, size=size)
    assert causes(found) == [*[None] * 5, MissCause.EVICTED_BY_OWN, *[None] * 4, MissCause.EVICTED_BY_OTHERS]
    assert {each.key.cause: each.saved_tokens for each in found.groups} == {
        MissCause.EVICTED_BY_OWN: None,
        MissCause.EVICTED_BY_OTHERS: None,
    }
    unbounded = diagnosed(log_of(blocks[0], *blocks[1:5], blocks[0], blocks[0]))
    assert unbounded.groups == ()


def test_tokens_whose_retention_has_expired() -> None:
    blocks = [text_of(seed, 128) for seed in range(8)]
    size = CacheSize(capacity_tokens=4 * 128, block_size=16, policy="lru", probation_share=1.0)
    with log_of(*blocks, blocks[0]) as log:
        log.prompts[0] = dataclasses.replace(log.prompts[0], retention=Retention(80, ttl_s=1.0))
        found = diagnose(log, Examiner(characters), min_lost_tokens=MIN_LOST_TOKENS, size=size)
    assert causes(found) == [*[None] * 8, MissCause.EXPIRED]


@pytest.mark.parametrize("reason", ["EVICTED", "EXPIRED", "NO_WINDOW", "NO_STATE", "NOT_LOADED", "READ_DISABLED"])
def test_what_a_server_has_reported_is_a_cause(reason: str) -> None:
    with log_of(HEAD, HEAD + TAIL, HEAD + TAIL + MORE) as log:
        log.prompts[1] = dataclasses.replace(log.prompts[1], reported=ReportedReuse(16, MissReason(reason)))
        log.prompts[2] = dataclasses.replace(
            log.prompts[2], reported=ReportedReuse(len(HEAD + TAIL), MissReason.DIVERGED)
        )
        found = diagnose(log, Examiner(characters), min_lost_tokens=MIN_LOST_TOKENS)
    assert causes(found) == [None, MissCause(reason), None]
    assert found.groups[0].lost_tokens == len(HEAD) - 16


def test_seconds_are_those_of_the_time_model() -> None:
    times = TimeModel(token_bytes=1, token_s=0.5)
    found = diagnosed(log_of(*(f"{HEAD} id: {each} {TAIL}" for each in ("4f2a9c1", "b07e55d"))), times=times)
    (group,) = found.groups
    assert found.computed_s == found.computed_tokens * 0.5
    assert (group.lost_s, group.saved_s) == (group.lost_tokens * 0.5, (group.saved_tokens or 0) * 0.5)


def test_only_so_many_groups_are_replayed() -> None:
    prompts = [
        f"{HEAD} id: {one} {TAIL} at {other} {MORE}" for one, other in (("4f2a9c1", "10:31"), ("b07e55d", "10:47"))
    ]
    found = diagnosed(log_of(*prompts), max_groups=1)
    assert [each.key.cause for each in found.groups] == [MissCause.RANDOM_ID]
    assert found.num_other_groups == 1


def test_answers_are_cached_with_their_prompts() -> None:
    with PromptLog() as log:
        for text, answer in ((HEAD, TAIL), (HEAD + TAIL + MORE, "")):
            log.add(LoggedPrompt("log", len(text), ACME), [*map(ord, text)], [*map(ord, answer)])
        found = diagnose(log, Examiner(characters), min_lost_tokens=MIN_LOST_TOKENS)
    assert found.cached_tokens == len(HEAD + TAIL)
    assert found.groups == ()
