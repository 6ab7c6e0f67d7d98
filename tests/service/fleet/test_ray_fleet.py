"""A fleet on Ray: real processes, which are killed and suspended."""

from __future__ import annotations

import os
import signal

import grpc
import numpy as np
import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

from bench.fleet.processes import listener_of
from radixkv.service.client import Client, KVSource
from radixkv.service.fleet.ray_fleet import APPLICATION
from radixkv.v1 import fleet_pb2
from tests.offload.tiers.redis_server import SERVER, WHY_NOT, redis_server
from tests.patience import PATIENCE_S, wait_until
from tests.service.fleet.fleet_process import FleetProcess, listening_elsewhere, running_fleet

pytestmark = pytest.mark.slow

PREFIX_TOKENS = 256
BLOCK_SIZE = 64


def prompt(prefix: int, own: int = 0) -> list[int]:
    """Return a prompt of a random prefix with the seed `prefix`, and nine tokens `own`."""
    return [*np.random.default_rng(prefix).integers(500, size=PREFIX_TOKENS).tolist(), *([own] * 9)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    settings = ("fleet.least_match_tokens=64", "fleet.health_timeout_s=1.5")
    flags = [part for setting in settings for part in ("--set", setting)]
    with running_fleet("--replicas", "2", *flags, log=tmp_path_factory.mktemp("fleet") / "log") as running:
        yield running


@pytest.fixture
def client(fleet):
    with Client(fleet.address, timeout_s=PATIENCE_S) as opened:
        yield opened


def route(fleet: FleetProcess, ids: list[int], tenant: str = "", avoid=()) -> fleet_pb2.RouteResponse:
    with Client(fleet.address, timeout_s=PATIENCE_S) as client:
        return client.route(ids, tenant=tenant, avoid=avoid)


def replicas(fleet: FleetProcess) -> list[int]:
    """Return the ids of the processes of the replicas."""
    return fleet.pids(f"ServeReplica:{APPLICATION}:Replica")


def has_replicas(fleet: FleetProcess, num_replicas: int = 2) -> bool:
    try:
        return route(fleet, [1]).num_replicas == num_replicas
    except grpc.RpcError:
        return False


def test_all_of_ray_listens_on_loopback(fleet) -> None:
    assert listening_elsewhere(fleet.pids()) == []


def test_prompts_are_routed_to_their_prefixes(fleet, client) -> None:
    wait_until(lambda: has_replicas(fleet))
    homes = {}
    for own in range(3):
        for prefix in range(6):
            answer = client.prefill(prompt(prefix, own), tenant="acme")
            assert (answer.usage.cached_tokens >= PREFIX_TOKENS) == (own > 0)
            homes.setdefault(prefix, route(fleet, prompt(prefix, own), "acme").address)
    assert len(set(homes.values())) == 2


def test_the_router_learns_from_events_of_prompts_that_it_did_not_route(fleet, client) -> None:
    first = route(fleet, [1]).address
    with Client(first, timeout_s=PATIENCE_S) as replica:
        replica.prefill(prompt(50), tenant="acme")
    wait_until(lambda: route(fleet, prompt(50, 1), "acme").cached_tokens == PREFIX_TOKENS)
    assert route(fleet, prompt(50, 1), "acme").address == first
    assert route(fleet, prompt(50, 1), "acme").reason == fleet_pb2.ROUTED_BY_PREFIX


def test_all_replicas_are_counted_and_purged(fleet, client) -> None:
    wait_until(lambda: has_replicas(fleet))
    one, two = addresses(fleet)
    for address in (one, two):
        with Client(address, timeout_s=PATIENCE_S) as replica:
            replica.prefill(prompt(55), tenant="acme")
    stats = client.stats()
    assert {each.address for each in stats.replicas} == {one, two}
    assert (
        stats.blocks.published
        == sum(each.stats.blocks.published for each in stats.replicas)
        >= 2 * PREFIX_TOKENS // BLOCK_SIZE
    )
    assert client.purge(tenant="acme").freed_blocks >= 2 * PREFIX_TOKENS // BLOCK_SIZE
    assert "acme" not in [each.tenant for each in client.stats().tenants if each.cached_blocks]


def test_a_killed_replica_fails_no_call_and_is_restarted(fleet, client) -> None:
    wait_until(lambda: has_replicas(fleet))
    client.prefill(prompt(60))
    home = route(fleet, prompt(60)).address
    before = replicas(fleet)
    os.kill(listener_of(home, replicas(fleet)), signal.SIGKILL)
    for own in range(5):
        assert client.prefill(prompt(60, own)).usage.prompt_tokens == PREFIX_TOKENS + 9
        assert sum(len(chunk.token_ids) for chunk in client.generate(prompt(60, own), max_new_tokens=4)) == 4
    assert route(fleet, prompt(60)).address != home
    wait_until(lambda: has_replicas(fleet) and len(set(replicas(fleet)) - set(before)) == 1)


def test_one_replica_decodes_what_another_one_has_computed(fleet, client) -> None:
    wait_until(lambda: has_replicas(fleet))
    ids, home = prompt(70), route(fleet, prompt(70), "acme").address
    with Client(home, timeout_s=PATIENCE_S) as replica:
        held = replica.prefill(ids, tenant="acme", hold_lease=True)
        source = KVSource(address=home, lease_id=held.lease_id, epoch=held.epoch)
        chunks = list(client.generate(ids, tenant="acme", kv_source=source, max_new_tokens=5))
        chunks_of_home = list(replica.generate(ids, tenant="acme", max_new_tokens=5))
        assert tokens_of(chunks) == tokens_of(chunks_of_home)
        assert chunks[0].usage.remote_tokens >= PREFIX_TOKENS
        with pytest.raises(grpc.RpcError) as refused:
            list(client.generate(ids, kv_source=KVSource(address="127.0.0.1:1", lease_id="a", epoch=1)))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        other = next(each for each in addresses(fleet) if each != home)
        with Client(other, timeout_s=PATIENCE_S) as stranger, pytest.raises(grpc.RpcError) as refused:
            list(stranger.generate(ids, tenant="acme", kv_source=source))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_suspended_replica_fails_no_call(fleet, client) -> None:
    wait_until(lambda: has_replicas(fleet))
    client.prefill(prompt(80))
    home = route(fleet, prompt(80)).address
    suspended = listener_of(home, replicas(fleet))
    os.kill(suspended, signal.SIGSTOP)
    try:
        assert client.prefill(prompt(80, 1)).usage.prompt_tokens == PREFIX_TOKENS + 9
        assert route(fleet, prompt(80)).num_replicas == 1
        assert len(tokens_of(client.generate(prompt(80, 2), max_new_tokens=4))) == 4
    finally:
        os.kill(suspended, signal.SIGCONT)
    wait_until(lambda: has_replicas(fleet))


def test_a_stream_that_has_begun_ends_clearly_with_its_replica(fleet, client) -> None:
    wait_until(lambda: has_replicas(fleet))
    client.prefill(prompt(90))
    home = route(fleet, prompt(90)).address
    chunks = client.generate(prompt(90), max_new_tokens=4000)
    assert next(chunks).token_ids
    os.kill(listener_of(home, replicas(fleet)), signal.SIGKILL)
    with pytest.raises(grpc.RpcError) as ended:
        list(chunks)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "it was lost in the middle of the response" in ended.value.details()
    wait_until(lambda: has_replicas(fleet))


def test_a_new_ingress_on_the_same_port_learns_all_by_snapshots(fleet, client) -> None:
    wait_until(lambda: has_replicas(fleet))
    ids = prompt(100)
    client.prefill(ids, tenant="acme")
    home = route(fleet, ids, "acme").address
    (before,) = fleet.pids(f"ServeReplica:{APPLICATION}:Ingress")
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: has_replicas(fleet))
    assert fleet.pids(f"ServeReplica:{APPLICATION}:Ingress") != [before]
    wait_until(lambda: route(fleet, ids, "acme").cached_tokens == PREFIX_TOKENS)
    assert route(fleet, ids, "acme").address == home


def tokens_of(chunks) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


def addresses(fleet: FleetProcess) -> list[str]:
    """Return the addresses of both replicas."""
    one = route(fleet, [1]).address
    return [one, route(fleet, [1], avoid=[one]).address]


@pytest.mark.skipif(SERVER is None, reason=WHY_NOT)
def test_a_shared_store_serves_the_blocks_of_a_killed_replica_and_a_fleet_that_stops_finishes_its_answers(
    tmp_path,
) -> None:
    with redis_server(tmp_path) as redis:
        store = ("--set", f"tiers.redis_url={redis.url}", "--set", "tiers.trusted=true")
        flags = (*store, "--set", f"server.drain_timeout_s={PATIENCE_S}")
        with running_fleet("--replicas", "2", *flags, log=tmp_path / "log") as fleet:
            wait_until(lambda: has_replicas(fleet))
            one, two = addresses(fleet)
            prompts = [prompt(number) for number in range(5)]
            with Client(one, timeout_s=PATIENCE_S) as first, Client(two, timeout_s=PATIENCE_S) as second:
                cold = [first.prefill(ids, tenant="acme", return_logits=True) for ids in prompts]
                num_blocks = len(prompts) * PREFIX_TOKENS // BLOCK_SIZE
                wait_until(lambda: [tier.saved_blocks for tier in first.stats().tiers] == [num_blocks])
                os.kill(listener_of(one, replicas(fleet)), signal.SIGKILL)
                warm = [second.prefill(ids, tenant="acme", return_logits=True) for ids in prompts]
            assert PREFIX_TOKENS in [each.usage.remote_tokens for each in warm], (
                "a busy machine may load some prompts too late"
            )
            assert [each.logits for each in warm] == [each.logits for each in cold]
            with Client(fleet.address, timeout_s=PATIENCE_S) as client:
                chunks = client.generate(prompts[0], max_new_tokens=200, ignore_eos=True)
                first = next(chunks)
                fleet.terminate()
                assert len(tokens_of([first, *chunks])) == 200


def test_prompts_are_prefilled_and_decoded_on_different_replicas(tmp_path) -> None:
    ids = prompt(200)
    flags = ("--prefill-replicas", "1", "--decode-replicas", "1", "--set", f"fleet.start_timeout_s={PATIENCE_S}")
    with running_fleet(*flags, log=tmp_path / "log") as fleet:
        (computing,) = fleet.pids(f"ServeReplica:{APPLICATION}:Prefill")
        (generating,) = fleet.pids(f"ServeReplica:{APPLICATION}:Decode")
        address = route(fleet, ids).address
        assert listener_of(address, [computing, generating]) == computing
        with Client(fleet.address, timeout_s=PATIENCE_S) as client, Client(address, timeout_s=PATIENCE_S) as replica:
            chunks = list(client.generate(ids, tenant="acme", max_new_tokens=5))
            assert chunks[-1].usage.cached_tokens == 0
            assert replica.prefill(ids, tenant="acme").next_token_id == tokens_of(chunks)[0]
            with pytest.raises(grpc.RpcError) as refused:
                list(replica.generate(ids, tenant="acme"))
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            again = list(client.generate(ids, tenant="acme", max_new_tokens=5))
            assert (tokens_of(again), again[-1].usage.cached_tokens) == (tokens_of(chunks), len(ids) - 1)
            wait_until(lambda: replica.stats().held_leases == 0)
            os.kill(computing, signal.SIGKILL)
            assert tokens_of(client.generate(ids, tenant="acme", max_new_tokens=5)) == tokens_of(chunks)
            os.kill(generating, signal.SIGKILL)
            assert tokens_of(client.generate(ids, tenant="acme", max_new_tokens=5)) == tokens_of(chunks)
