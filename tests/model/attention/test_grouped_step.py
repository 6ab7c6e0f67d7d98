"""With windowed layers in a pool of their own, which keeps only parts for the window and a step, no bit changes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from radixkv.blocks import BlockCopy
from radixkv.cache.window_pool import Reach, WindowPool, min_parts
from radixkv.cache.windowed_layers import WindowLease
from radixkv.compute.forward import Chunk
from radixkv.compute.runner import Runner
from radixkv.config import ModelConfig
from radixkv.errors import InvariantViolation
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.loading import load_model
from radixkv.model.model import Model
from radixkv.storage.device_pool import KVStorage
from radixkv.storage.layer_groups import LayerGroups
from tests.model.exact.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.model.exact.exact_cases import MODELS

BLOCK_SIZE = 16
NUM_BLOCKS = 64
STEP_TOKENS = 150


@pytest.fixture(params=["mistral", "gemma2", "qwen2", "gpt_oss", "gemma4_text"], scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = write_checkpoint(MODELS[request.param], tmp_path_factory.mktemp(request.param))
    return load_model(ModelConfig(path=str(directory), dtype="float32"))


def tokens_of(seed: int, count: int) -> bytes:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count).astype("<u4").tobytes()


class TwoPools:
    """A runner over two pools whose unwritten slots are NaN, and the `WindowPool` that allocates the parts."""

    def __init__(self, model: Model, kv_dtype: str = "auto") -> None:
        groups = LayerGroups.of(model.windows, model.max_tokens)
        reach = Reach.of_window(groups.window)
        num_parts = min_parts(reach, BLOCK_SIZE, STEP_TOKENS) + 4
        shape = model.kv_shape.stored_as(kv_dtype)
        storage = KVStorage(
            NUM_BLOCKS, BLOCK_SIZE, shape, model.device, is_by_layer=True, groups=groups, num_parts=num_parts
        )
        for pool in (*storage.pools, *storage.part_pools):
            pool.blocks.fill_(0xFF)
        self.runner = Runner(model, storage, TorchKernels())
        self.pool = WindowPool(NUM_BLOCKS, num_parts, BLOCK_SIZE, reach, STEP_TOKENS)

    def chunk(
        self,
        lease: WindowLease,
        tokens: bytes,
        start: int,
        end: int,
        blocks: np.ndarray,
        copy: BlockCopy | None = None,
    ) -> Chunk:
        cover = lease.cover(blocks, start, end, copy)
        return Chunk(tokens, start, end, blocks, copy, True, part_ids=cover.part_ids, part_copy=cover.copy)

    def compute(
        self,
        tokens: bytes,
        blocks: np.ndarray,
        lease: WindowLease,
        start: int = 0,
        copy: BlockCopy | None = None,
        seed: int = 0,
    ) -> torch.Tensor:
        """Compute a prompt from `start` on in random chunks. Returns the logits after its last token."""
        rng, logits = random.Random(seed), torch.empty(0)
        while start < len(tokens) // 4:
            end = min(len(tokens) // 4, start + rng.choice((1, 17, 33, STEP_TOKENS)))
            result = self.runner.run([self.chunk(lease, tokens, start, end, blocks, copy)])
            assert result.is_finite == [True]
            lease.settle(end)
            logits, start, copy = result.logits[0].clone(), end, None
        return logits


def logits_with_one_pool(model: Model, tokens: bytes, kv_dtype: str = "auto") -> torch.Tensor:
    """Compute a prompt at once, with all layers in one pool."""
    shape = model.kv_shape.stored_as(kv_dtype)
    runner = Runner(model, KVStorage(NUM_BLOCKS, BLOCK_SIZE, shape, model.device, is_by_layer=True), TorchKernels())
    blocks = np.arange(-(-len(tokens) // 4 // BLOCK_SIZE), dtype=np.int32)
    return runner.run([Chunk(tokens, 0, len(tokens) // 4, blocks, None, wants_logits=True)]).logits[0].clone()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "k8v4"])
def test_no_bit_depends_on_released_parts(model: Model, kv_dtype: str) -> None:
    two_pools, tokens = TwoPools(model, kv_dtype), tokens_of(1, 400)
    blocks = np.random.default_rng(2).permutation(NUM_BLOCKS).astype(np.int32)[:25]
    lease = WindowLease(two_pools.pool, 0)
    got = two_pools.compute(tokens, blocks, lease)
    assert two_pools.pool.num_evicted > 0
    assert torch.equal(got, logits_with_one_pool(model, tokens, kv_dtype))


@pytest.mark.parametrize("num_cached", [161, 176, 190])
def test_no_bit_depends_on_a_hit_whose_earlier_parts_are_gone(model: Model, num_cached: int) -> None:
    two_pools, tokens = TwoPools(model), tokens_of(1, 200)
    blocks = np.arange(20, 33, dtype=np.int32)
    first = WindowLease(two_pools.pool, 0)
    two_pools.compute(tokens, blocks, first)
    first.close()
    window = two_pools.pool.reach.num_tokens + 1
    two_pools.pool.free_parts(blocks[: (num_cached - window + 1) // BLOCK_SIZE])
    assert two_pools.pool.num_reusable_tokens(blocks, num_cached) == num_cached
    lease = WindowLease(two_pools.pool, 0)
    lease.pin_hit(blocks[: -(-num_cached // BLOCK_SIZE)], num_cached)
    tokens = tokens[: num_cached * 4] + tokens_of(3, 100)  # four bytes per token
    num_whole_blocks = num_cached // BLOCK_SIZE
    own_blocks = np.arange(40, 40 + -(-len(tokens) // 4 // BLOCK_SIZE) - num_whole_blocks, dtype=np.int32)
    copy = BlockCopy(int(blocks[num_whole_blocks]), 40) if num_cached % BLOCK_SIZE else None
    got = two_pools.compute(
        tokens, np.concatenate((blocks[:num_whole_blocks], own_blocks)), lease, num_cached, copy, seed=5
    )
    assert torch.equal(got, logits_with_one_pool(model, tokens))


def test_requests_of_one_step_do_not_see_each_other(model: Model) -> None:
    two_pools = TwoPools(model)
    prompts = [tokens_of(7, 190), tokens_of(8, 75)]
    tables = [np.arange(12, dtype=np.int32), np.arange(30, 35, dtype=np.int32)]
    leases = [WindowLease(two_pools.pool, 0) for _ in prompts]
    logits = {}
    for start in (0, 70, 140):
        running = [i for i, tokens in enumerate(prompts) if start < len(tokens) // 4]
        ends = {i: min(len(prompts[i]) // 4, start + 70) for i in running}
        chunks = [two_pools.chunk(leases[i], prompts[i], start, ends[i], tables[i]) for i in running]
        for i, row in zip(running, two_pools.runner.run(chunks).logits, strict=True):
            logits[i] = row.clone()
            leases[i].settle(ends[i])
    for i, tokens in enumerate(prompts):
        assert torch.equal(logits[i], logits_with_one_pool(model, tokens))


def test_a_chunk_without_parts_is_a_bug_of_the_caller(model: Model) -> None:
    two_pools, tokens = TwoPools(model), tokens_of(1, 20)
    blocks = np.arange(2, dtype=np.int32)
    with pytest.raises(InvariantViolation, match="parts: the chunks lack the parts of the storage"):
        two_pools.runner.run([Chunk(tokens, 0, 20, blocks, None, wants_logits=True)])
    plain = Runner(model, KVStorage(4, BLOCK_SIZE, model.kv_shape, model.device), TorchKernels())
    with pytest.raises(InvariantViolation, match="the chunks have parts, the storage has none"):
        plain.run([Chunk(tokens, 0, 20, blocks, None, wants_logits=True, part_ids=blocks)])
