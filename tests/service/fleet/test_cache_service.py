"""Purge, Stats, Statement, EndSession, Hint and Explain of a fleet, over connections to servers of fake engines."""

from __future__ import annotations

import hashlib
import threading

import grpc
import grpc.aio
import pytest

from radixkv.api.statement import Use
from radixkv.errors import Draining
from radixkv.namespace import Namespace
from radixkv.service.client import AsyncClient, HintStatus, InvalidArgument
from radixkv.service.fleet import cache_service
from radixkv.service.fleet.cache_service import join_outcomes, sum_statements, sum_stats
from radixkv.service.fleet.servicers import REPLICA
from radixkv.v1 import cache_pb2, cache_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from radixkv.v1.cache_pb2 import (
    BlockStats,
    RequestStats,
    StatsResponse,
    TenantStats,
    TierStats,
    TimeStats,
    TokenStats,
)
from radixkv.v1.hints_pb2 import HintOutcome
from tests import fakes
from tests.fake_runner import tokens
from tests.service.accounted import accounted_engine
from tests.service.diagnosed import diagnosed_engine
from tests.service.fake_engine import FAKE, FakeEngine
from tests.service.fleet.test_ingress_server import fleet, run


def test_a_purge_reaches_all_replicas() -> None:
    async def test() -> None:
        async with fleet(3) as served, AsyncClient(served.address) as client:
            response = await client.purge(tenant="acme")
            assert (response.freed_blocks, response.pinned_blocks) == (3 * 7, 3 * 2)
            purges = [engine.purges for engine in served.engines.values()]
            assert purges == [purges[0]] * 3
            assert purges[0] == [("acme", None, None)]
            await client.purge(everything=True)
            assert [len(engine.purges) for engine in served.engines.values()] == [2, 2, 2]

    run(test)


def test_a_purge_that_misses_a_replica_says_which() -> None:
    async def test() -> None:
        async with fleet(2) as served, AsyncClient(served.address) as client:
            failing = list(served.engines)[1]
            served.engines[failing].purge = refuse
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.purge(everything=True)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert f"replicas: 1 of 2 failed, retry the call: {failing}" in refused.value.details()
            first = next(iter(served.engines))
            assert len(served.engines[first].purges) == 1

    run(test)


def refuse(**_) -> None:
    raise Draining("service: shutting down")


def test_statistics_are_sums_and_those_of_each_replica() -> None:
    async def test() -> None:
        async with fleet(2) as served, AsyncClient(served.address) as client:
            response = await client.stats()
            assert [each.address for each in response.replicas] == list(served.engines)
            replica_stats = [each.stats for each in response.replicas]
            assert response.blocks.total == sum(each.blocks.total for each in replica_stats) > 0
            assert (response.model, response.epoch) == (replica_stats[0].model, 0)
            stats_of_a = await client.stats(tenant="a")
            assert {each.tenant for each in stats_of_a.tenants} == {"a"}

    run(test)


def test_an_unreachable_replica_is_named_and_not_counted() -> None:
    async def test() -> None:
        async with fleet(2) as served, AsyncClient(served.address) as client:
            connection = served.state.connections[1]
            connection.cache = cache_pb2_grpc.CacheServiceStub(grpc.aio.insecure_channel("127.0.0.1:1"))
            response = await client.stats()
            first, second = response.replicas
            assert (first.error, second.HasField("stats")) == ("", False)
            assert second.error.startswith("UNAVAILABLE: ")
            assert response.blocks == first.stats.blocks
            served.state.connections[0].cache = connection.cache
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.stats()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            served.state.update(())
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.stats()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

    run(test)


def test_callers_have_the_same_permissions_as_on_a_server(tmp_path) -> None:
    roles = {"tenant": 'role = "tenant"\ntenant = "acme"', "admin": 'role = "admin"', "reader": 'role = "reader"'}
    credentials = [
        f'[[credentials]]\nname = "{name}"\n{role}\ntoken_sha256 = "{hashlib.sha256(name.encode()).hexdigest()}"\n'
        for name, role in roles.items()
    ]
    (tmp_path / "tokens").write_text("".join(credentials), "utf-8")

    async def test() -> None:
        async with fleet(1, tokens_file=str(tmp_path / "tokens"), insecure=True) as served:
            (engine,) = served.engines.values()
            async with grpc.aio.insecure_channel(served.address) as channel:
                stub = cache_pb2_grpc.CacheServiceStub(channel)
                everything, other = cache_pb2.PurgeRequest(), cache_pb2.PurgeRequest(tenant="b")
                for name, request, code in (
                    (None, everything, grpc.StatusCode.UNAUTHENTICATED),
                    ("reader", everything, grpc.StatusCode.PERMISSION_DENIED),
                    ("tenant", other, grpc.StatusCode.PERMISSION_DENIED),
                ):
                    metadata = (("authorization", f"Bearer {name}"),) if name else ()
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await stub.Purge(request, metadata=metadata)
                    assert refused.value.code() is code
                assert engine.purges == []
                await stub.Purge(everything, metadata=(("authorization", "Bearer tenant"),))
                await stub.Purge(everything, metadata=(("authorization", "Bearer admin"),))
                assert [tenant for tenant, _, _ in engine.purges] == ["acme", None]
                await stub.Stats(cache_pb2.StatsRequest(), metadata=(("authorization", "Bearer reader"),))

    run(test)


def replica_stats(scale: int, **fields) -> StatsResponse:
    """Return the statistics of a replica, with counts that are proportional to `scale`."""
    return StatsResponse(
        model="m",
        device="cpu",
        epoch=scale,
        uptime_s=10.0 * scale,
        block_size=64,
        blocks=BlockStats(total=100, free=100 - scale, published=scale),
        requests=RequestStats(running=scale),
        tokens=TokenStats(prompt=10 * scale, cached=scale),
        block_bytes=4096,
        known_tenants=scale,
        model_fingerprint="f",
        **fields,
    )


def test_counts_add_up_and_equal_values_stay() -> None:
    response = sum_stats([replica_stats(1), replica_stats(2)], 100)
    assert (response.model, response.device, response.block_size, response.block_bytes, response.model_fingerprint) == (
        "m", "cpu", 64, 4096, "f",
    )  # fmt: skip
    assert response.blocks == BlockStats(total=200, free=197, published=3)
    assert (response.requests, response.tokens) == (RequestStats(running=3), TokenStats(prompt=30, cached=3))
    assert (response.epoch, response.uptime_s, response.known_tenants) == (0, 20.0, 2)
    assert not response.HasField("first_tokens")


def test_the_sum_of_one_replica_equals_it_except_for_the_epoch() -> None:
    expected = replica_stats(
        3, tenants=[TenantStats(tenant="a", cached_blocks=1)], tiers=[TierStats(tier="host", blocks=1)]
    )
    response = sum_stats([expected], 100)
    expected.ClearField("epoch")
    assert response == expected


def test_tenants_and_stores_add_up_by_their_names() -> None:
    first = replica_stats(
        1,
        tenants=[
            TenantStats(tenant="a", cached_blocks=5, ceiling_blocks=9, stored_blocks={"host": 1}),
            TenantStats(tenant="b", cached_blocks=1),
        ],
        tiers=[TierStats(tier="host", is_working=True, blocks=4), TierStats(tier="redis", is_working=True, blocks=1)],
    )
    second = replica_stats(
        2,
        tenants=[
            TenantStats(tenant="b", cached_blocks=7),
            TenantStats(tenant="a", stored_blocks={"host": 2, "disk": 3}),
        ],
        tiers=[TierStats(tier="host", is_working=True, blocks=6), TierStats(tier="redis", loaded_blocks=2)],
    )
    response = sum_stats([first, second], 100)
    by_name = {each.tenant: each for each in response.tenants}
    assert [each.tenant for each in response.tenants] == ["b", "a"]
    assert (by_name["a"].cached_blocks, by_name["a"].HasField("ceiling_blocks")) == (5, False)
    assert dict(by_name["a"].stored_blocks) == {"host": 3, "disk": 3}
    host, redis = response.tiers
    assert (host.tier, host.blocks, host.is_working) == ("host", 10, True)
    assert (redis.is_working, redis.HasField("blocks"), redis.loaded_blocks) == (False, False, 2)
    assert [each.tenant for each in sum_stats([first, second], 1).tenants] == ["b"]


def test_times_add_up_by_their_buckets() -> None:
    times = TimeStats(bounds_s=[1.0, 2.0], counts=[1, 2, 3], sum_s=4.0)
    response = sum_stats(
        [replica_stats(1, first_tokens=times), replica_stats(1, first_tokens=times), replica_stats(1)], 100
    )
    assert response.first_tokens == TimeStats(bounds_s=[1.0, 2.0], counts=[2, 4, 6], sum_s=8.0)


def test_a_session_ends_on_all_replicas() -> None:
    async def test() -> None:
        async with fleet(2) as served, AsyncClient(served.address) as client:
            ended = await client.end_session("build-42", tenant="acme")
            assert (ended.was_known, ended.blocks) == (True, 2 * 7)
            assert not (await client.end_session("unknown", tenant="acme")).was_known
            stats = await client.stats(max_sessions=3)
            assert [each.session_id for each in stats.sessions] == ["build-42", "build-42", "chat"]

    run(test)


ACME = Namespace("fake", "acme")
PROMPT = range(1, 13)  # three blocks


def publish(engine: FakeEngine, prompt: range, session_id: str = "") -> None:
    with engine.cache.lease(ACME, tokens(prompt), session_id=session_id) as lease:
        lease.commit(lease.num_tokens)


def cached_tokens(engine: FakeEngine) -> int:
    """Count the tokens of PROMPT that the engine has cached for acme."""
    return engine.cache.match(ACME, tokens([*PROMPT, 1])).cached_tokens


async def hint(client: AsyncClient, action_type: str, prompt: range | None = PROMPT, **payload) -> HintOutcome:
    actions = [{"action_id": "a-1", "action_type": action_type, "payload": payload}]
    (outcome,) = (await client.hint(actions, prompt, tenant="acme")).hints
    assert outcome.action_id == "a-1"
    return outcome


def test_a_hint_reaches_all_replicas_that_cache_the_prompt() -> None:
    async def test() -> None:
        async with fleet(3) as served, AsyncClient(served.address) as client:
            first, second, third = served.engines.values()
            assert await hint(client, "kv.release") == HintOutcome(
                action_id="a-1",
                status=HintStatus.HINT_REFUSED,
                reason="nothing that it addresses is cached",
                is_missing=True,
            )
            publish(first, PROMPT)
            outcome = await hint(client, "kv.share")
            assert (outcome.status, outcome.tokens) == (HintStatus.HINT_ACCEPTED, 12)
            publish(second, PROMPT[:8])
            outcome = await hint(client, "kv.share")
            assert (outcome.status, outcome.tokens, outcome.reason) == (
                HintStatus.HINT_CLIPPED, 12 + 8, "4 tokens are not cached",
            )  # fmt: skip
            with second.cache.lease(ACME, tokens(PROMPT)):
                outcome = await hint(client, "kv.release")
            assert (outcome.status, outcome.tokens) == (HintStatus.HINT_CLIPPED, 12)
            assert (
                outcome.reason
                == "8 tokens stay, because requests use them, or because one hint cannot drop so many segments"
            )
            assert [cached_tokens(engine) for engine in (first, second, third)] == [0, 8, 0]

    run(test)


def test_a_prompt_is_explained_by_the_replica_that_would_get_it() -> None:
    async def test() -> None:
        async with fleet(2) as served, grpc.aio.insecure_channel(served.address) as channel:
            prefill = prefill_pb2_grpc.PrefillServiceStub(channel)
            probe = prefill.Probe(prefill_pb2.ProbeRequest(token_ids=[1, 2, 3], tenant="acme"))
            await probe
            name = dict(await probe.trailing_metadata())[REPLICA]
            for engine in served.engines.values():
                fakes.publish(
                    engine.cache, "here" if engine is served.engines[name] else "there", FAKE._replace(tenant="acme")
                )
            call = cache_pb2_grpc.CacheServiceStub(channel).Explain(
                cache_pb2.ExplainRequest(token_ids=[1, 2, 3], tenant="acme")
            )
            response = await call
            assert dict(await call.trailing_metadata())[REPLICA] == name
            assert "".join(map(chr, response.difference.branch.token_ids)) == "here"

    run(test)


def test_a_statement_is_the_sum_of_those_of_all_replicas(tmp_path) -> None:
    async def test() -> None:
        async with fleet(2) as served, AsyncClient(served.address) as client:
            uses = {"acme": Use(requests=1, device_token_s=0.5)}, {"acme": Use(requests=2), "zeta": Use(requests=4)}
            for (name, engine), use in zip(served.engines.items(), uses, strict=True):
                engine.statements = accounted_engine(tmp_path / name, **use).statements
            statement = await client.statement(since="2026-11")
            # Each engine has covered 300 s, and had 10 requests of acme on November 1.
            assert (statement.since, statement.until, statement.covered_s) == ("2026-11-01", "2026-11-28", 600.0)
            lines = [(line.period, line.tenant, line.requests, line.device_token_s) for line in statement.lines]
            assert lines == [("2026-11", "acme", 10 + 1 + 10 + 2, 0.5), ("2026-11", "zeta", 4, 0.0)]
            assert [line.requests for line in (await client.statement(tenant="zeta")).lines] == [4]

    run(test)


def test_statements_are_added_up_outside_of_the_event_loop(tmp_path, monkeypatch) -> None:
    threads = set()

    def sum_and_record_thread(responses):
        threads.add(threading.get_ident())
        return sum_statements(responses)

    monkeypatch.setattr(cache_service, "sum_statements", sum_and_record_thread)

    async def test() -> None:
        async with fleet(1) as served, AsyncClient(served.address) as client:
            served.engines[next(iter(served.engines))].statements = accounted_engine(tmp_path).statements
            await client.statement()
            assert threads
            assert threading.get_ident() not in threads

    run(test)


def test_a_refusal_by_all_replicas_does_not_suggest_a_retry() -> None:
    async def test() -> None:
        async with fleet(2) as served, AsyncClient(served.address) as client:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.statement()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert refused.value.details().startswith("replicas: 2 of 2 failed: ")

    run(test)


def test_a_statement_that_misses_a_replica_is_refused(tmp_path) -> None:
    async def test() -> None:
        async with fleet(2) as served, AsyncClient(served.address) as client:
            first, second = served.engines
            served.engines[first].statements = accounted_engine(tmp_path).statements
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.statement()
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert f"replicas: 1 of 2 failed, retry the call: {second}" in refused.value.details()

    run(test)


def test_an_explanation_without_a_prompt_is_refused() -> None:
    async def test() -> None:
        async with fleet(1) as served, AsyncClient(served.address) as client:
            with pytest.raises(InvalidArgument, match="expected at least 1 token"):
                await client.explain([])

    run(test)


def test_a_hint_reaches_all_replicas_that_know_the_session_or_the_adapter() -> None:
    async def test() -> None:
        async with fleet(3) as served, AsyncClient(served.address) as client:
            first, second, third = served.engines.values()
            for engine in (first, third):
                publish(engine, PROMPT, "build-42")
            outcome = await hint(client, "kv.release", None, session_id="build-42")
            assert (outcome.status, outcome.tokens) == (HintStatus.HINT_ACCEPTED, 2 * 12)
            outcome = await hint(client, "kv.release", None, session_id="build-42")
            assert outcome.reason == "payload.session_id: no such session of this tenant is cached"
            for engine in (first, second, third):
                publish(engine, PROMPT)
            outcome = await hint(client, "kv.retain", None, adapter="", priority=20)
            assert (outcome.status, outcome.tokens) == (HintStatus.HINT_ACCEPTED, 3 * 12)

    run(test)


def test_only_the_replica_that_would_get_the_prompt_loads_it() -> None:
    async def test() -> None:
        async with fleet(3) as served, AsyncClient(served.address) as client:
            outcome = await hint(client, "kv.prefetch")
            assert (outcome.status, outcome.tokens) == (HintStatus.HINT_ACCEPTED, 12)
            (loader,) = (name for name, engine in served.engines.items() if engine.loads)
            assert sum(len(engine.hints) for engine in served.engines.values()) == 1
            routes = [await client.route([*PROMPT, number], tenant="acme") for number in range(4)]
            assert [each.address for each in routes] == [loader] * 4
            actions = [{"action_type": each} for each in ("kv.share", "kv.prefetch", "kv.release")]
            publish(served.engines[loader], PROMPT)
            response = await client.hint(actions, PROMPT, tenant="acme")
            assert [each.tokens for each in response.hints] == [12] * 3
            assert {name: engine.hints[-1][0] for name, engine in served.engines.items()} == {
                name: ["kv.share", "kv.prefetch", "kv.release"] if name == loader else ["kv.share", "kv.release"]
                for name in served.engines
            }

    run(test)


def test_a_session_is_loaded_where_its_last_prompt_is_known() -> None:
    async def test() -> None:
        async with fleet(2) as served, AsyncClient(served.address) as client:
            outcome = await hint(client, "kv.prefetch", session_id="build-42")
            assert outcome.is_missing
            assert [len(engine.hints) for engine in served.engines.values()] == [1, 1]
            outcome = await hint(client, "kv.prefetch", None)
            assert outcome.reason == "payload: expected session_id, or a prompt in the request"

    run(test)


def test_a_hint_that_misses_a_replica_says_which() -> None:
    async def test() -> None:
        async with fleet(2) as served, AsyncClient(served.address) as client:
            failing = list(served.engines)[1]
            served.engines[failing].hint = lambda *_: refuse()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await hint(client, "kv.release")
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert f"replicas: 1 of 2 failed, retry the call: {failing}" in refused.value.details()
            served.state.update(())
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await hint(client, "kv.release")
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE

    run(test)


def test_hints_with_too_many_actions_reach_no_replica() -> None:
    async def test() -> None:
        async with fleet(2) as served, AsyncClient(served.address) as client:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.hint([{"action_type": "kv.release"}] * 17, PROMPT)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "kv_hints.actions: expected at most 16, got 17" in refused.value.details()
            assert [engine.hints for engine in served.engines.values()] == [[], []]

    run(test)


ACCEPTED = HintOutcome(status=HintStatus.HINT_ACCEPTED, tokens=5)
CLIPPED = HintOutcome(status=HintStatus.HINT_CLIPPED, tokens=3, reason="a part is in use")
REFUSED = HintOutcome(status=HintStatus.HINT_REFUSED, reason="all is in use")
MISSING = HintOutcome(status=HintStatus.HINT_REFUSED, reason="not cached", is_missing=True)


@pytest.mark.parametrize(
    ("outcomes", "joined"),
    [
        ([ACCEPTED], ACCEPTED),
        ([ACCEPTED, MISSING, ACCEPTED], HintOutcome(status=HintStatus.HINT_ACCEPTED, tokens=10)),
        ([CLIPPED, MISSING], CLIPPED),
        ([CLIPPED, CLIPPED], HintOutcome(status=HintStatus.HINT_CLIPPED, tokens=6, reason="a part is in use")),
        ([ACCEPTED, REFUSED], HintOutcome(status=HintStatus.HINT_CLIPPED, tokens=5, reason="all is in use")),
        (
            [REFUSED, CLIPPED],
            HintOutcome(status=HintStatus.HINT_CLIPPED, tokens=3, reason="all is in use; a part is in use"),
        ),
        ([MISSING, REFUSED], REFUSED),
        ([MISSING, MISSING], MISSING),
    ],
)
def test_an_action_is_accepted_if_all_replicas_that_hold_something_accept_it(
    outcomes: list[HintOutcome], joined: HintOutcome
) -> None:
    assert join_outcomes(outcomes) == joined


def test_the_causes_of_misses_on_all_replicas_are_added_up() -> None:
    async def test() -> None:
        async with fleet(2) as served, AsyncClient(served.address) as client:
            first, second = served.engines.values()
            first.misses = diagnosed_engine("acme", "globex").misses
            second.misses = diagnosed_engine("acme").misses
            # The fake engines have the same misses for each of their tenants, and there are three such profiles.
            diagnosis = await client.diagnose(max_causes=3)
            assert (diagnosis.covered_s, diagnosis.prompts, diagnosis.first_prompts) == (90.0, 60, 3)
            assert [(each.tenant, each.cause, each.prompts, each.lost_tokens) for each in diagnosis.causes] == [
                ("acme", "RANDOM_ID", 6, 366_000),
                ("globex", "RANDOM_ID", 3, 183_000),
                ("acme", "SALT_CHANGED", 2, 1000),
            ]
            assert diagnosis.causes[0].lost_s == 36.0
            assert not diagnosis.causes[2].HasField("lost_s")
            assert diagnosis.further_causes == 1
            second.misses = None  # as on a decode replica
            assert (await client.diagnose()).prompts == 40
            first.misses = None
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.diagnose()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "server.diagnosed_share" in refused.value.details()

    run(test)


def test_too_many_causes_of_misses_reach_no_replica() -> None:
    async def test() -> None:
        async with fleet(2) as served, AsyncClient(served.address) as client:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await client.diagnose(max_causes=101)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    run(test)
