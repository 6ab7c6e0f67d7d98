"""Compressed generations over gRPC, with tiers and events: what they generate is never reused."""

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

_BLOCK, _POOL_TOKENS, _PROMPT_TOKENS, _NEW_TOKENS = 64, 1024, 3 * 64 + 3, 150
EACH = [Compression(policy, 48) for policy in CompressionPolicy]


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


def generated(client: Client, prompt: list[int], **options: object) -> tuple[list[int], GenerateResponse]:
    answers = list(client.generate(prompt, max_new_tokens=_NEW_TOKENS, ignore_eos=True, **options))
    return [token_id for answer in answers for token_id in answer.token_ids], answers[-1]


def is_idle(client: Client) -> bool:
    blocks = client.stats().blocks
    return (blocks.leased, blocks.pinned) == (0, 0)


@pytest.mark.parametrize("compression", EACH, ids=lambda asked: asked.policy)
def test_compressed_tokens_are_not_cached_saved_or_announced(client: Client, compression: Compression) -> None:
    client.purge(everything=True)
    prompt = random_ids(_PROMPT_TOKENS, seed=EACH.index(compression))
    answer, last = generated(client, prompt, compression=compression)
    assert (last.usage.written_tokens, len(answer)) == (_PROMPT_TOKENS, _NEW_TOKENS)
    turn = [*prompt, *answer, 1, 2]
    probed = client.probe(turn)
    assert (probed.cached_tokens, probed.stored_tokens) == (_PROMPT_TOKENS, 0)
    marker = random_ids(_BLOCK, seed=50 + EACH.index(compression))
    client.prefill(marker)
    known: dict[int, str] = {}
    with closing(client.subscribe()) as batches:
        while not known.keys() >= set(hashes_of(marker)):
            apply(next(batches), known)
    assert set(known) == {*hashes_of(prompt), *hashes_of(marker)}

    cold = client.prefill(turn, read_cache=False, write_cache=False, return_logits=True)
    warm = client.prefill(turn, write_cache=False, return_logits=True)
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, _PROMPT_TOKENS)
    assert warm.logits == cold.logits

    client.prefill(random_ids(_POOL_TOKENS, seed=100))  # which takes all blocks
    assert client.probe(turn).cached_tokens == 0
    again = client.prefill(turn, write_cache=False, return_logits=True)
    assert again.usage.cached_tokens <= 3 * _BLOCK
    assert again.usage.host_tokens > 0, "the prompt was saved, as always"
    np.testing.assert_array_equal(logits_of(again), logits_of(cold))
    assert generated(client, prompt, compression=compression)[0] == answer, "the prompt comes from a store now"
    assert is_idle(client)


def blocks_of(client: Client, ids: list[int]) -> tuple[int, dict[int, bytes]]:
    """Hold a prompt and fetch the K/V of its blocks. Return the number of cached tokens, and the blocks."""
    held = client.prefill(ids, hold_lease=True)
    blocks: dict[int, bytes] = {}
    for part in client.fetch_kv(held.lease_id):
        blocks[part.block] = blocks.get(part.block, b"") + part.data
    client.release(held.lease_id)
    return held.usage.cached_tokens, blocks


def test_no_call_or_restart_makes_compressed_tokens_reusable(tmp_path: Path) -> None:
    compression = EACH[1]
    settings = (f"tiers.disk_path={tmp_path}", f"cache.capacity_tokens={2 * _POOL_TOKENS}", "transfer.serve=true")
    options = [word for setting in settings for word in ("--set", setting)]
    prompt, turn = random_ids(_PROMPT_TOKENS, seed=20), random_ids(_PROMPT_TOKENS, seed=20)
    with serving(*options) as (_, address), Client(address, timeout_s=PATIENCE_S) as client:
        stream = client.generate(prompt, max_new_tokens=700, ignore_eos=True, compression=compression)
        while len(turn) < _PROMPT_TOKENS + 2 * _BLOCK:
            turn += next(stream).token_ids
        retained = client.retain(turn, Retention(priority=100)).retained
        assert retained.granted_tokens <= _PROMPT_TOKENS
        assert client.probe(turn).cached_tokens == _PROMPT_TOKENS
        client.public.register("turn", turn[: 4 * _BLOCK])
        found, while_running = blocks_of(client, turn)
        stream.close()  # type: ignore[attr-defined]
        wait_until(lambda: client.stats().blocks.leased == 0)
        client.public.unregister("turn")
        client.purge(everything=True)
        none_found, from_nothing = blocks_of(client, turn)
        assert (found, none_found) == (4 * _BLOCK, 0)
        assert while_running.keys() == set(range(len(turn) // _BLOCK))
        assert while_running == from_nothing, "the same bits, though a part was found"
        client.purge(everything=True)
        answer, _ = generated(client, prompt, compression=compression)
    with serving(*options) as (_, address), Client(address, timeout_s=PATIENCE_S) as client:
        turn = [*prompt, *answer, 1]
        assert client.probe(turn).stored_tokens == 3 * _BLOCK
        loaded, from_disk = blocks_of(client, turn)
        client.purge(everything=True)
        assert (loaded, from_disk) == (3 * _BLOCK, blocks_of(client, turn)[1])


def test_a_client_that_disconnects_leaves_nothing_behind(client: Client) -> None:
    for compression in EACH:
        stream = client.generate(
            random_ids(_PROMPT_TOKENS, seed=9), max_new_tokens=700, ignore_eos=True, compression=compression
        )
        next(iter(stream))
        stream.close()  # type: ignore[attr-defined]
        wait_until(lambda: is_idle(client))


def test_several_completions_and_the_async_client(client: Client, address: str) -> None:
    async def talk() -> list[GenerateResponse]:
        async with AsyncClient(address, timeout_s=PATIENCE_S) as other:
            stream = other.generate(prompt, max_new_tokens=40, ignore_eos=True, compression=EACH[1], n=3, seed=1)
            return [answer async for answer in stream]

    prompt = random_ids(_PROMPT_TOKENS, seed=8)
    answers = asyncio.run(talk())
    by_index = [[t for each in answers if each.index == index for t in each.token_ids] for index in range(3)]
    alone = list(client.generate(prompt, max_new_tokens=40, ignore_eos=True, compression=EACH[1], seed=1))
    assert by_index == [[t for each in alone for t in each.token_ids]] * 3  # all sample the most likely token
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
    assert (refused.value.code().name, refused.value.details().startswith(message)) == (code, True)
