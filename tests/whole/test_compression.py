"""Compressed generations over gRPC, with tiers and events: the tokens that they generate are never reused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import numpy as np
import pytest

from radixkv.service.client import AsyncClient, Client, Compression, CompressionPolicy, Retention, logits_of
from radixkv.v1.prefill_pb2 import GenerateResponse
from tests.patience import PATIENCE_S, wait_until
from tests.whole.forked_server import serving
from tests.whole.test_events_end_to_end import apply, hashes_of

_BLOCK_SIZE, _POOL_TOKENS, _NEW_TOKENS = 64, 1024, 150
_PROMPT_TOKENS = 3 * _BLOCK_SIZE + 3  # three whole blocks, and an incomplete one
_COMPRESSIONS = [Compression(policy, 48) for policy in CompressionPolicy]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("disk")
    settings = ("tiers.host_bytes=100000000", f"tiers.disk_path={folder}", f"cache.capacity_tokens={_POOL_TOKENS}")
    with serving(*(word for setting in settings for word in ("--set", setting))) as (_, address):
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with Client(address, timeout_s=PATIENCE_S) as client:
        yield client


def random_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def generate(client: Client, prompt: list[int], **options: object) -> tuple[list[int], GenerateResponse]:
    """Return the generated tokens and the last response."""
    chunks = list(client.generate(prompt, max_new_tokens=_NEW_TOKENS, ignore_eos=True, **options))
    return [token_id for chunk in chunks for token_id in chunk.token_ids], chunks[-1]


def is_idle(client: Client) -> bool:
    blocks = client.stats().blocks
    return (blocks.leased, blocks.pinned) == (0, 0)


@pytest.mark.parametrize("compression", _COMPRESSIONS, ids=lambda compression: compression.policy)
def test_compressed_tokens_are_not_cached_saved_or_announced(client: Client, compression: Compression) -> None:
    client.purge(everything=True)
    prompt = random_ids(_PROMPT_TOKENS, seed=_COMPRESSIONS.index(compression))
    answer, last = generate(client, prompt, compression=compression)
    assert (last.usage.written_tokens, len(answer)) == (_PROMPT_TOKENS, _NEW_TOKENS)
    turn = [*prompt, *answer, 1, 2]
    probed = client.probe(turn)
    assert (probed.cached_tokens, probed.stored_tokens) == (_PROMPT_TOKENS, 0)
    marker = random_ids(_BLOCK_SIZE, seed=50 + _COMPRESSIONS.index(compression))
    client.prefill(marker)
    # Events are read until those of the marker, which was stored after the generation had ended.
    announced: dict[int, str] = {}
    with closing(client.subscribe()) as batches:
        while not announced.keys() >= set(hashes_of(marker)):
            apply(next(batches), announced)
    assert set(announced) == {*hashes_of(prompt), *hashes_of(marker)}

    cold = client.prefill(turn, read_cache=False, write_cache=False, return_logits=True)
    warm = client.prefill(turn, write_cache=False, return_logits=True)
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, _PROMPT_TOKENS)
    assert warm.logits == cold.logits

    client.prefill(random_ids(_POOL_TOKENS, seed=100))  # needs all blocks, so that the prompt is evicted
    assert client.probe(turn).cached_tokens == 0
    loaded = client.prefill(turn, write_cache=False, return_logits=True)
    assert loaded.usage.cached_tokens <= 3 * _BLOCK_SIZE
    assert loaded.usage.host_tokens > 0, "the prompt, unlike the generated tokens, is saved when it is evicted"
    np.testing.assert_array_equal(logits_of(loaded), logits_of(cold))
    assert generate(client, prompt, compression=compression)[0] == answer, (
        "a generation whose prompt is loaded from a tier has the same result"
    )
    assert is_idle(client)


def fetch_blocks(client: Client, ids: list[int]) -> tuple[int, dict[int, bytes]]:
    """Prefill a prompt, and fetch its K/V. Return the number of cached tokens, and the K/V of each block by index."""
    held = client.prefill(ids, hold_lease=True)
    blocks: dict[int, bytes] = {}
    for part in client.fetch_kv(held.lease_id):
        blocks[part.block] = blocks.get(part.block, b"") + part.data
    client.release(held.lease_id)
    return held.usage.cached_tokens, blocks


def test_no_call_or_restart_makes_compressed_tokens_reusable(tmp_path: Path) -> None:
    compression = _COMPRESSIONS[1]
    settings = (f"tiers.disk_path={tmp_path}", f"cache.capacity_tokens={2 * _POOL_TOKENS}", "transfer.serve=true")
    options = [word for setting in settings for word in ("--set", setting)]
    prompt = random_ids(_PROMPT_TOKENS, seed=20)
    turn = list(prompt)
    with serving(*options) as (_, address), Client(address, timeout_s=PATIENCE_S) as client:
        stream = client.generate(prompt, max_new_tokens=700, ignore_eos=True, compression=compression)
        while len(turn) < _PROMPT_TOKENS + 2 * _BLOCK_SIZE:
            turn += next(stream).token_ids
        retained = client.retain(turn, Retention(priority=100)).retained
        assert retained.granted_tokens <= _PROMPT_TOKENS
        assert client.probe(turn).cached_tokens == _PROMPT_TOKENS
        client.public.register("turn", turn[: 4 * _BLOCK_SIZE])
        num_cached, kv_while_running = fetch_blocks(client, turn)
        stream.close()  # type: ignore[attr-defined]
        wait_until(lambda: client.stats().blocks.leased == 0)
        client.public.unregister("turn")
        client.purge(everything=True)
        num_cached_after_purge, kv_after_purge = fetch_blocks(client, turn)
        assert (num_cached, num_cached_after_purge) == (4 * _BLOCK_SIZE, 0), (
            "only the public prefix was cached, then nothing"
        )
        assert kv_while_running.keys() == set(range(len(turn) // _BLOCK_SIZE))
        assert kv_while_running == kv_after_purge, "the cached part has the same bits as when it is computed"
        client.purge(everything=True)
        answer, _ = generate(client, prompt, compression=compression)
    with serving(*options) as (_, address), Client(address, timeout_s=PATIENCE_S) as client:
        turn = [*prompt, *answer, 1]
        assert client.probe(turn).stored_tokens == 3 * _BLOCK_SIZE
        num_loaded, kv_from_disk = fetch_blocks(client, turn)
        client.purge(everything=True)
        _, computed_kv = fetch_blocks(client, turn)
        assert num_loaded == 3 * _BLOCK_SIZE
        assert kv_from_disk == computed_kv


def test_a_client_that_disconnects_leaves_nothing_behind(client: Client) -> None:
    for compression in _COMPRESSIONS:
        stream = client.generate(
            random_ids(_PROMPT_TOKENS, seed=9), max_new_tokens=700, ignore_eos=True, compression=compression
        )
        next(iter(stream))
        stream.close()  # type: ignore[attr-defined]
        wait_until(lambda: is_idle(client))


def test_each_of_several_completions_is_compressed_as_if_it_were_alone(client: Client, address: str) -> None:
    async def generate_three() -> list[GenerateResponse]:
        async with AsyncClient(address, timeout_s=PATIENCE_S) as async_client:
            stream = async_client.generate(
                prompt, max_new_tokens=40, ignore_eos=True, compression=_COMPRESSIONS[1], n=3, seed=1
            )
            return [chunk async for chunk in stream]

    prompt = random_ids(_PROMPT_TOKENS, seed=8)
    completions: list[list[int]] = [[], [], []]
    for chunk in asyncio.run(generate_three()):
        completions[chunk.index] += chunk.token_ids
    alone = list(client.generate(prompt, max_new_tokens=40, ignore_eos=True, compression=_COMPRESSIONS[1], seed=1))
    # Without a temperature, all choose the most likely token.
    assert completions == [[token_id for chunk in alone for token_id in chunk.token_ids]] * 3
    assert is_idle(client)


@pytest.mark.parametrize(
    ("compression", "code", "message"),
    [
        (Compression(CompressionPolicy.H2O, 1), "INVALID_ARGUMENT", "compression.max_tokens: expected at least 2"),
        (
            Compression(CompressionPolicy.SNAPKV, 900),
            "INVALID_ARGUMENT",
            "prefill.token_ids, compression.max_tokens: expected at most 1024 tokens of K/V",
        ),
    ],
)
def test_invalid_parameters_are_refused_by_name(
    client: Client, compression: Compression, code: str, message: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(client.generate(random_ids(_PROMPT_TOKENS, 1), max_new_tokens=700, compression=compression))
    assert refused.value.code().name == code
    assert refused.value.details().startswith(message)
