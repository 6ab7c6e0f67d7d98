"""Public prefixes over gRPC, with the embedded model: computed once for a hundred tenants, bitwise identical."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from radixkv.service.client import Client, Compression, CompressionPolicy, logits_of
from tests.patience import PATIENCE_S
from tests.whole.forked_server import serving

_BLOCK_SIZE = 64
# Eight whole blocks, and five tokens in a ninth.
_SYSTEM = [index * 7 % 251 for index in range(8 * _BLOCK_SIZE + 5)]
_SETTINGS = ("--set", "cache.capacity_tokens=32768", "--set", "tenants.opted_out.uses_public_prefixes=false")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving(*_SETTINGS) as (_, address), Client(address, timeout_s=PATIENCE_S) as client:
        yield client


@pytest.fixture
def system(client: Client) -> Iterator[list[int]]:
    """A prompt that is registered as a public prefix."""
    client.public.register("system", _SYSTEM)
    yield _SYSTEM
    client.public.unregister("system")
    client.purge(everything=True)


def _num_used_blocks(client: Client) -> int:
    blocks = client.stats().blocks
    return int(blocks.total - blocks.free)


def test_a_hundred_tenants_compute_and_store_a_public_prefix_once(client: Client, system: list[int]) -> None:
    num_computed, num_used = client.stats().tokens.computed, _num_used_blocks(client)
    for number in range(100):
        usage = client.prefill([*system, number, 1], tenant=f"t{number}").usage
        assert (usage.cached_tokens, usage.public_tokens) == (len(system), len(system))
    assert client.stats().tokens.computed - num_computed == 200
    # Each tenant has one block, with a copy of the last five tokens of the prefix.
    assert _num_used_blocks(client) - num_used == 100
    (listed,) = client.public.list().public_prefixes
    assert (listed.uses, listed.users, listed.blocks) == (100, 0, 9)


def test_logits_are_bitwise_identical_to_those_without_a_public_prefix(client: Client, system: list[int]) -> None:
    for prompt in ([*system, 9, 8, 7], system[:300], [*system[:100], *range(80)], system):
        shared = client.prefill(prompt, tenant="acme", return_logits=True)
        alone = client.prefill(prompt, tenant="opted_out", read_cache=False, write_cache=False, return_logits=True)
        assert shared.usage.public_tokens > 0
        assert alone.usage.cached_tokens == 0
        np.testing.assert_array_equal(logits_of(shared), logits_of(alone))


def test_generations_equal_those_of_a_tenant_that_opted_out(client: Client, system: list[int]) -> None:
    def generate(tenant: str) -> list[int]:
        chunks = client.generate([*system, 5], tenant=tenant, max_new_tokens=70, ignore_eos=True)
        return [token_id for chunk in chunks for token_id in chunk.token_ids]

    assert generate("acme") == generate("opted_out")
    assert client.prefill([*system, 5, *generate("acme")], tenant="acme").usage.cached_tokens >= len(system) + 64
    assert client.prefill([*system, 5, 6], tenant="opted_out").usage.public_tokens == 0


@pytest.mark.parametrize("policy", CompressionPolicy)
def test_a_compressed_generation_releases_the_public_prefix(
    client: Client, system: list[int], policy: CompressionPolicy
) -> None:
    def generate(tenant: str) -> list[int]:
        chunks = client.generate(
            [*system, 5], tenant=tenant, max_new_tokens=70, ignore_eos=True, compression=Compression(policy, 64)
        )
        tokens = []
        for chunk in chunks:
            tokens += chunk.token_ids
            if len(tokens) > 30:  # the K/V of the prompt is compressed by then
                assert client.public.list().public_prefixes[0].users == 0
        return tokens

    assert generate("acme") == generate("opted_out")
    assert client.probe([*system, 5, *generate("acme")], tenant="acme").cached_tokens == len(system) + 1
    blocks = client.stats().blocks
    assert (blocks.leased, client.public.list().public_prefixes[0].users) == (0, 0)


def test_a_probe_reports_a_public_prefix_and_a_purge_keeps_it(client: Client, system: list[int]) -> None:
    client.prefill([*system, 1, 2, 3], tenant="acme")
    assert client.probe([*system, 1, 2, 3], tenant="acme").cached_tokens == len(system) + 2
    client.purge(tenant="acme")
    assert client.probe([*system, 1, 2, 3], tenant="acme").cached_tokens == len(system)
    client.purge(everything=True)
    assert client.probe([*system, 1, 2, 3], tenant="other").cached_tokens == len(system)
    assert client.probe([*system, 1, 2, 3], tenant="opted_out").cached_tokens == 0


def test_unregistering_frees_the_public_prefix(client: Client) -> None:
    num_used_before = _num_used_blocks(client)
    client.public.register("one", _SYSTEM)
    client.public.register("two", _SYSTEM[1:])
    assert _num_used_blocks(client) - num_used_before == 9 + 9
    client.public.unregister("one")
    client.public.unregister("two")
    assert _num_used_blocks(client) == num_used_before
    assert client.prefill([*_SYSTEM, 1], tenant="late").usage.cached_tokens == 0
