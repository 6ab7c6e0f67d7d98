"""Public prefixes over gRPC, with the embedded model: computed once for a hundred tenants, bitwise identical."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from radixkv.service.client import Client, Compression, CompressionPolicy, logits_of
from tests.patience import PATIENCE_S
from tests.whole.forked_server import serving

_BLOCK = 64
_SYSTEM = [index * 7 % 251 for index in range(8 * _BLOCK + 5)]
_SETTINGS = ("--set", "cache.capacity_tokens=32768", "--set", "tenants.shy.uses_public_prefixes=false")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(*_SETTINGS) as (_, address), Client(address, timeout_s=PATIENCE_S) as client:
        yield client


@pytest.fixture
def system(client: Client) -> Iterator[list[int]]:
    client.public.register("system", _SYSTEM)
    yield _SYSTEM
    client.public.unregister("system")
    client.purge(everything=True)


def _held_blocks(client: Client) -> int:
    blocks = client.stats().blocks
    return int(blocks.total - blocks.free)


def test_a_hundred_tenants_compute_and_store_a_public_prefix_once(client: Client, system: list[int]) -> None:
    computed, held = client.stats().tokens.computed, _held_blocks(client)
    for number in range(100):
        usage = client.prefill([*system, number, 1], tenant=f"t{number}").usage
        assert (usage.cached_tokens, usage.public_tokens) == (len(system), len(system))
    assert client.stats().tokens.computed - computed == 200
    assert _held_blocks(client) - held == 100  # a block each, with the copy of the prefix's last five tokens
    (listed,) = client.public.list().public_prefixes
    assert (listed.uses, listed.users, listed.blocks) == (100, 0, 9)


def test_logits_are_bitwise_identical_to_those_without_a_public_prefix(client: Client, system: list[int]) -> None:
    for prompt in ([*system, 9, 8, 7], system[:300], [*system[:100], *range(80)], system):
        shared = client.prefill(prompt, tenant="acme", return_logits=True)
        alone = client.prefill(prompt, tenant="shy", read_cache=False, write_cache=False, return_logits=True)
        assert shared.usage.public_tokens > 0
        assert alone.usage.cached_tokens == 0
        np.testing.assert_array_equal(logits_of(shared), logits_of(alone))


def test_generations_equal_those_of_a_tenant_that_opted_out(client: Client, system: list[int]) -> None:
    def generated(tenant: str) -> list[int]:
        answers = client.generate([*system, 5], tenant=tenant, max_new_tokens=70, ignore_eos=True)
        return [token_id for answer in answers for token_id in answer.token_ids]

    assert generated("acme") == generated("shy")
    assert client.prefill([*system, 5, *generated("acme")], tenant="acme").usage.cached_tokens >= len(system) + 64
    assert client.prefill([*system, 5, 6], tenant="shy").usage.public_tokens == 0


@pytest.mark.parametrize("policy", CompressionPolicy)
def test_a_compressed_generation_releases_the_public_prefix(
    client: Client, system: list[int], policy: CompressionPolicy
) -> None:
    def generated(tenant: str) -> list[int]:
        asked = Compression(policy, 64)
        answers = client.generate([*system, 5], tenant=tenant, max_new_tokens=70, ignore_eos=True, compression=asked)
        tokens = []
        for answer in answers:
            tokens += answer.token_ids
            if len(tokens) > 30:
                assert client.public.list().public_prefixes[0].users == 0
        return tokens

    assert generated("acme") == generated("shy")
    assert client.probe([*system, 5, *generated("acme")], tenant="acme").cached_tokens == len(system) + 1
    blocks = client.stats().blocks
    assert (blocks.leased, client.public.list().public_prefixes[0].users) == (0, 0)


def test_a_probe_reports_a_public_prefix_and_a_purge_keeps_it(client: Client, system: list[int]) -> None:
    client.prefill([*system, 1, 2, 3], tenant="acme")
    assert client.probe([*system, 1, 2, 3], tenant="acme").cached_tokens == len(system) + 2
    client.purge(tenant="acme")
    assert client.probe([*system, 1, 2, 3], tenant="acme").cached_tokens == len(system)
    client.purge(everything=True)
    assert client.probe([*system, 1, 2, 3], tenant="other").cached_tokens == len(system)
    assert client.probe([*system, 1, 2, 3], tenant="shy").cached_tokens == 0


def test_unregistering_frees_the_public_prefix(client: Client) -> None:
    before = _held_blocks(client)
    client.public.register("one", _SYSTEM)
    client.public.register("two", _SYSTEM[1:])
    assert _held_blocks(client) - before == 9 + 9
    client.public.unregister("one")
    client.public.unregister("two")
    assert _held_blocks(client) == before
    assert client.prefill([*_SYSTEM, 1], tenant="late").usage.cached_tokens == 0
