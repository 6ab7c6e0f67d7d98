"""Sessions and hints over gRPC, with the embedded model and a tier in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from radixkv.service.client import (
    Awaits,
    Client,
    HintStatus,
    InvalidArgument,
    MissReason,
    Retention,
)
from radixkv.v1.hints_pb2 import HintOutcome
from tests.patience import PATIENCE_S, wait_until
from tests.whole.forked_server import serving

_BLOCK_SIZE, _POOL_TOKENS = 64, 1024


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    settings = ("tiers.host_bytes=100000000", f"cache.capacity_tokens={_POOL_TOKENS}", "cache.probation_share=1")
    arguments = (argument for setting in settings for argument in ("--set", setting))
    with serving(*arguments) as (_, address), Client(address, timeout_s=PATIENCE_S) as client:
        yield client


@pytest.fixture(autouse=True)
def _empty_cache(client: Client) -> None:
    client.purge(everything=True)


def prompt(number: int, num_blocks: int = 4) -> list[int]:
    """Return a numbered prompt of whole blocks; prompts of different numbers have no common prefix."""
    return [(index * 7 + number) % 251 for index in range(num_blocks * _BLOCK_SIZE)]


def hint(client: Client, action_type: str, tokens: list[int] | None = None, **payload: Any) -> HintOutcome:
    """Send a hint with one action, and return its outcome. `tenant` is that of the call and not in the payload."""
    tenant = payload.pop("tenant", "")
    actions = [{"action_id": "a-1", "action_type": action_type, "payload": payload}]
    (outcome,) = client.hint(actions, tokens, tenant=tenant).hints
    assert outcome.action_id == "a-1"
    return outcome


def test_the_requests_of_a_session_are_one_entry_in_the_statistics_and_share_its_state(client: Client) -> None:
    client.prefill(prompt(1), session_id="s", tenant="acme")
    client.prefill(prompt(1) + [1] * _BLOCK_SIZE, session_id="s", tenant="acme", awaits=Awaits.TOOL)
    client.prefill(prompt(2), session_id="t", tenant="acme", awaits=Awaits.USER)
    client.prefill(prompt(3), session_id="s", tenant="other")
    stats = client.stats(max_sessions=10)
    assert [(each.tenant, each.session_id, each.awaits, each.blocks) for each in stats.sessions] == [
        ("other", "s", Awaits.UNKNOWN, 4),
        ("acme", "t", Awaits.USER, 4),
        ("acme", "s", Awaits.TOOL, 5),
    ]
    assert {each.tenant: each.sessions for each in stats.tenants}["acme"] == 2
    assert [each.session_id for each in client.stats(max_sessions=1, tenant="acme").sessions] == ["t"]
    segments = client.segments(tenant="acme", session_id="s").segments
    assert sum(each.num_blocks for each in segments) == 5
    assert {(each.session_id, each.awaits) for each in segments} == {("s", Awaits.TOOL)}
    assert not client.segments(tenant="acme", session_id="unknown").segments
    with pytest.raises(InvalidArgument, match="max_sessions: expected at most 100, got 101"):
        client.stats(max_sessions=101)
    with pytest.raises(InvalidArgument, match="session_id: expected at most 256 characters, got 257"):
        client.segments(tenant="acme", session_id="s" * 257)
    with pytest.raises(InvalidArgument, match="session_id: requires a tenant"):
        client.segments(session_id="s")


def test_blocks_that_only_an_ended_session_has_used_are_evicted_first(client: Client) -> None:
    client.prefill(prompt(1))
    client.prefill(prompt(2) + prompt(3), session_id="s")
    client.prefill(prompt(2) + prompt(4))
    ended = client.end_session("s")
    assert (ended.was_known, ended.blocks) == (True, 4)
    assert not client.end_session("s").was_known
    client.prefill(prompt(5))  # the pool has 16 blocks, so that four are evicted
    assert client.probe([*prompt(1), 1]).cached_tokens == 4 * _BLOCK_SIZE
    assert client.probe(prompt(2) + prompt(3)).cached_tokens == 4 * _BLOCK_SIZE, (
        "the four blocks of prompt 3 are evicted"
    )
    with pytest.raises(InvalidArgument, match="session_id: it is required"):
        client.end_session("")


@pytest.mark.parametrize(("write_generated", "cached_tokens"), [(True, 4 * _BLOCK_SIZE + 70), (False, 4 * _BLOCK_SIZE)])
def test_generated_tokens_are_published_if_write_generated_is_true(
    client: Client, write_generated: bool, cached_tokens: int
) -> None:
    chunks = client.generate(prompt(1), max_new_tokens=71, ignore_eos=True, write_generated=write_generated)
    answer = [token for chunk in chunks for token in chunk.token_ids]
    probe = client.probe(prompt(1) + answer + [1])
    assert probe.cached_tokens == cached_tokens


def test_renewal_requires_a_time_to_live(client: Client) -> None:
    assert client.prefill(prompt(1), retention=Retention(80, ttl_s=9, renew=True)).retained.granted_tokens > 0
    with pytest.raises(InvalidArgument, match=r"retention\.renew: expected a ttl"):
        client.prefill(prompt(1), retention=Retention(80, renew=True))


def test_hints_retain_and_pin_a_range_of_a_prompt(client: Client) -> None:
    client.prefill(prompt(1), session_id="s")
    assert hint(client, "kv.retain", prompt(1), priority=70, ttl_seconds=60).status == HintStatus.HINT_CLIPPED
    (retained, *_) = sorted(client.segments().segments, key=lambda each: -each.priority)
    assert (retained.priority, retained.num_blocks) == (70, 3)  # a fifth of the pool may be retained
    outcome = hint(client, "kv.retain", session_id="s", directives=[{"start": 0, "end": 64, "priority": 30}])
    assert (outcome.status, outcome.tokens) == (HintStatus.HINT_ACCEPTED, 64)
    outcome = hint(client, "kv.pin", prompt(1), ttl_seconds=30, end=64)
    assert (outcome.status, outcome.tokens) == (HintStatus.HINT_ACCEPTED, 64)
    assert max(each.priority for each in client.segments().segments) == 100


def test_released_tokens_are_not_cached_and_demoted_ones_are_in_the_tier(client: Client) -> None:
    for number in (1, 2):
        client.prefill(prompt(number), session_id=f"s{number}")
    outcome = hint(client, "kv.demote", session_id="s1")
    assert (outcome.status, outcome.tokens) == (HintStatus.HINT_ACCEPTED, 4 * _BLOCK_SIZE)
    # A release from the middle of the second block frees the blocks after it.
    outcome = hint(client, "kv.release", prompt(2), start=_BLOCK_SIZE + 1)
    assert (outcome.status, outcome.tokens) == (HintStatus.HINT_ACCEPTED, 2 * _BLOCK_SIZE)
    wait_until(lambda: client.probe(prompt(1)).stored_tokens > 0)
    probes = [client.probe(prompt(number)) for number in (1, 2)]
    assert [(each.cached_tokens, each.stored_tokens) for each in probes] == [(0, 3 * _BLOCK_SIZE), (2 * _BLOCK_SIZE, 0)]
    assert client.prefill(prompt(1)).usage.host_tokens == 3 * _BLOCK_SIZE


def test_blocks_that_a_held_lease_uses_are_not_released(client: Client) -> None:
    held = client.prefill(prompt(1), hold_lease=True)
    client.prefill(prompt(1) + prompt(2))
    outcome = hint(client, "kv.release", prompt(1) + prompt(2))
    assert (outcome.status, outcome.tokens) == (HintStatus.HINT_CLIPPED, 4 * _BLOCK_SIZE)
    assert "requests use them" in outcome.reason
    client.release(held.lease_id)
    assert hint(client, "kv.release", prompt(1)).tokens == 4 * _BLOCK_SIZE


@pytest.mark.parametrize("by_session", [True, False], ids=["session", "prompt"])
def test_a_session_is_loaded_before_its_next_turn(client: Client, by_session: bool) -> None:
    client.prefill(prompt(1), session_id="s", tenant="acme", awaits=Awaits.TOOL)
    hint(client, "kv.demote", prompt(1), tenant="acme")
    wait_until(lambda: client.probe([*prompt(1), 1], tenant="acme").stored_tokens == 4 * _BLOCK_SIZE)
    if by_session:
        outcome = hint(client, "kv.prefetch", session_id="s", tenant="acme")
    else:
        outcome = hint(client, "kv.prefetch", [*prompt(1), 1], tenant="acme")
    assert (outcome.status, outcome.tokens) == (HintStatus.HINT_ACCEPTED, 4 * _BLOCK_SIZE)
    wait_until(lambda: client.probe([*prompt(1), 1], tenant="acme").cached_tokens == 4 * _BLOCK_SIZE)
    segments_of_session = client.segments(session_id="s", tenant="acme").segments
    assert sum(each.num_blocks for each in segments_of_session) == (4 if by_session else 0)
    assert {each.awaits for each in segments_of_session} <= {Awaits.TOOL}
    usage = client.prefill([*prompt(1), 1], session_id="s", tenant="acme").usage
    assert (usage.device_tokens, usage.host_tokens) == (4 * _BLOCK_SIZE, 0)


def test_the_hints_of_a_request_are_applied_when_it_has_ended(client: Client) -> None:
    envelope = {
        "protocol_version": "1.0",
        "message_id": "m",
        "actions": [
            {"action_id": "1", "action_type": "kv.retain", "action_version": "1.0", "payload": {"priority": 20}},
            {"action_id": "2", "action_type": "kv.evict", "action_version": "1.0", "payload": {"start": 128}},
            {"action_id": "3", "action_type": "kv.fly", "action_version": "1.0"},
            {"action_id": "4", "action_type": "kv.retain", "action_version": "2.0", "payload": {"priority": 20}},
        ],
    }
    response = client.prefill(prompt(1), kv_hints=envelope)
    assert [(each.action_id, each.status, each.tokens) for each in response.hints] == [
        ("1", HintStatus.HINT_ACCEPTED, 256),
        ("2", HintStatus.HINT_ACCEPTED, 128),
        ("3", HintStatus.HINT_REFUSED, 0),
        ("4", HintStatus.HINT_REFUSED, 0),
    ]
    assert client.probe(prompt(1)).cached_tokens == 128
    outcomes = [chunk.hints for chunk in client.generate(prompt(2), max_new_tokens=3, kv_hints=envelope, n=2)]
    assert sum(map(len, outcomes)) == 4


@pytest.mark.parametrize(
    ("action_type", "payload", "reason"),
    [
        ("kv.retain", {}, "payload.priority: it is required"),
        ("kv.retain", {"priority": 101}, "payload: retention.priority: expected 0 to 100, got 101"),
        ("kv.retain", {"priority": True}, "payload.priority: expected a whole number, got True"),
        ("kv.retain", {"priority": 1.5}, "payload.priority: expected a whole number, got 1.5"),
        ("kv.retain", {"priority": 60, "ttl_seconds": -1}, "payload: retention.ttl: expected more than 0"),
        ("kv.retain", {"priority": 60, "start": 9999}, "payload: retention.start_token: expected 0 to 255"),
        ("kv.retain", {"priority": 60, "prio": 1}, "payload.prio: expected one of session_id, scope"),
        ("kv.retain", {"directives": 7}, "payload.directives: expected a list, got 7"),
        ("kv.retain", {"directives": [1]}, "payload.directives[0]: expected an object"),
        ("kv.retain", {"directives": [{"priority": 5}] * 129}, "payload.directives: expected at most 128, got 129"),
        ("kv.pin", {}, "payload.ttl_seconds: it is required, because a pin must end"),
        ("kv.await", {"awaits": "godot"}, "payload.awaits: expected one of unknown, tool, user, nothing, got 'godot'"),
        ("kv.release", {"session_id": "unknown"}, "payload.session_id: no such session of this tenant is cached"),
        ("kv.release", {"session_id": 4}, "payload.session_id: expected a string, got 4"),
        ("kv.fly", {}, "action_type: expected one of kv.retain, kv.pin"),
    ],
)
def test_an_invalid_action_is_refused_with_the_reason(
    client: Client, action_type: str, payload: dict[str, Any], reason: str
) -> None:
    outcome = hint(client, action_type, prompt(1), **payload)
    assert outcome.status == HintStatus.HINT_REFUSED
    assert outcome.reason.startswith(reason)


def test_an_invalid_envelope_is_an_error(client: Client) -> None:
    with pytest.raises(InvalidArgument, match=r"kv_hints\.actions: expected at most 16, got 17"):
        client.hint([{"action_type": "kv.pin"}] * 17)
    with pytest.raises(InvalidArgument, match=r"kv_hints\.protocol_version: expected 1\.x or 0\.x, got '3'"):
        client.prefill(prompt(1), kv_hints={"protocol_version": "3"})
    with pytest.raises(ValueError, match="kv_hints: expected the fields of a KvHintsEnvelope"):
        client.prefill(prompt(1), kv_hints={"actions": 3})
    with pytest.raises(InvalidArgument, match="awaits: expected 0 to 3, got 9"):
        client.prefill(prompt(1), awaits=9)


def test_a_hint_that_names_neither_a_session_nor_a_prompt_is_refused(client: Client) -> None:
    outcome = hint(client, "kv.release")
    assert outcome.reason == "payload: expected session_id, or a prompt in the request"


def test_hints_of_one_tenant_do_not_reach_another(client: Client) -> None:
    client.prefill(prompt(1), session_id="s", tenant="acme")
    for payload in ({"session_id": "s"}, {}):
        outcome = hint(client, "kv.release", None if payload else prompt(1), tenant="other", **payload)
        assert outcome.status == HintStatus.HINT_REFUSED
    assert not client.end_session("s", tenant="other").was_known
    probe = client.probe([*prompt(1), 1], tenant="acme")
    assert (probe.cached_tokens, probe.miss_reason) == (4 * _BLOCK_SIZE, MissReason.NONE)


def test_a_purge_removes_sessions(client: Client) -> None:
    client.prefill(prompt(1), session_id="s")
    client.purge(everything=True)
    assert not client.stats(max_sessions=10).sessions


@pytest.mark.parametrize(
    ("options", "awaits"),
    [
        ({}, Awaits.USER),
        ({"tool_call_begin": "0"}, Awaits.TOOL),
        ({"tool_call_begin": "<never>"}, Awaits.USER),
        ({"awaits": Awaits.NOTHING}, Awaits.NOTHING),
        ({"regex": None, "ignore_eos": True}, Awaits.UNKNOWN),
    ],
    ids=["stop", "tool call", "no tool call", "set by the caller", "maximum length"],
)
def test_the_end_of_an_answer_decides_what_the_session_waits_for(
    client: Client, options: dict[str, Any], awaits: Awaits
) -> None:
    list(client.generate(prompt(1), max_new_tokens=24, session_id="s", **{"regex": "a[0-9]{3}", **options}))
    (session,) = client.stats(max_sessions=1).sessions
    assert session.awaits == awaits


def test_a_session_whose_request_holds_a_lease_records_what_it_waits_for(client: Client) -> None:
    held = client.prefill(prompt(1), session_id="s", awaits=Awaits.TOOL, hold_lease=True)
    client.release(held.lease_id)
    (session,) = client.stats(max_sessions=1).sessions
    assert session.awaits == Awaits.TOOL


def test_a_session_is_loaded_while_its_tool_runs(client: Client) -> None:
    for _ in range(3):  # the server learns how long the tools of this session take
        client.prefill(prompt(1), session_id="s", awaits=Awaits.TOOL)
    hint(client, "kv.demote", prompt(1))
    wait_until(lambda: client.probe([*prompt(1), 1]).cached_tokens == 4 * _BLOCK_SIZE)
    assert client.prefill([*prompt(1), 1], session_id="s").usage.device_tokens == 4 * _BLOCK_SIZE


def test_blocks_that_a_session_has_shared_are_kept_when_it_ends(client: Client) -> None:
    client.prefill(prompt(1) + prompt(2), session_id="s")
    outcome = hint(client, "kv.share", prompt(1) + prompt(2), end=4 * _BLOCK_SIZE)
    assert (outcome.status, outcome.tokens) == (HintStatus.HINT_ACCEPTED, 4 * _BLOCK_SIZE)
    client.prefill(prompt(3))
    assert client.end_session("s").blocks == 4
    client.prefill(prompt(4) + prompt(5))  # the pool has 16 blocks
    assert client.probe([*prompt(1), 1]).cached_tokens == 4 * _BLOCK_SIZE
    assert client.probe([*prompt(3), 1]).cached_tokens == 4 * _BLOCK_SIZE
    outcome = hint(client, "kv.share", session_id="s")
    assert (outcome.status, outcome.is_missing) == (HintStatus.HINT_REFUSED, True)


def test_a_hint_may_address_all_that_a_tenant_has_cached_with_a_salt(client: Client) -> None:
    for number, salt in ((1, "x"), (2, "x"), (3, "y")):
        client.prefill(prompt(number), tenant="acme", salt=salt)
    client.prefill(prompt(1), tenant="other", salt="x")
    outcome = hint(client, "kv.demote", salt="x", adapter="", tenant="acme")
    assert (outcome.status, outcome.tokens) == (HintStatus.HINT_ACCEPTED, 8 * _BLOCK_SIZE)
    wait_until(lambda: client.probe([*prompt(1), 1], tenant="acme", salt="x").stored_tokens == 4 * _BLOCK_SIZE)
    probes = [client.probe([*prompt(1), 1], tenant=tenant, salt="x").cached_tokens for tenant in ("acme", "other")]
    assert probes == [0, 4 * _BLOCK_SIZE]
    assert client.probe([*prompt(3), 1], tenant="acme", salt="y").cached_tokens == 4 * _BLOCK_SIZE
    assert hint(client, "kv.retain", salt="y", priority=20, tenant="acme").tokens == 4 * _BLOCK_SIZE
    outcome = hint(client, "kv.release", adapter="unknown", tenant="acme")
    assert outcome.reason == "payload.adapter: expected the name of a loaded adapter, got an unknown one"
    action = {"action_type": "kv.release", "action_version": "1.0", "payload": {"salt": "y"}}
    envelope = {"protocol_version": "1.0", "message_id": "m", "actions": [action]}
    response = client.prefill(prompt(3), tenant="acme", salt="y", kv_hints=envelope)
    assert response.hints[0].reason.startswith("payload.salt: the hints of a request address its prompt")
