"""Compares a checkpoint, as radixkv serves it, with transformers' eager attention, for any cached prefix."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from radixkv.blocks import BlockCopy
from radixkv.compute.forward import Chunk, ChunkState
from radixkv.compute.runner import Runner
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.model import Model
from radixkv.storage.device_pool import KVStorage
from tests.model.exact.checkpoints import VOCAB_SIZE, load_eager

BLOCK_SIZE = 16
_NUM_BLOCKS = 40
_NUM_TOKENS = 100
_ENDS = (1, 7, 33, 34, 64, 99, _NUM_TOKENS)
# Tokens that the second prompt has in common with the first: two blocks and a part of a third.
_SHARED_TOKENS = 37
# Positions at which the recurrent states are kept, since later chunks begin there.
_STATE_POSITIONS = (
    _SHARED_TOKENS // BLOCK_SIZE * BLOCK_SIZE,
    _SHARED_TOKENS + 1,
    3 * BLOCK_SIZE,
    _NUM_TOKENS - 1,
)


class Agreement:
    """One checkpoint, served by us and computed by transformers.

    Args:
        model: the checkpoint as we loaded it.
        directory: the directory of the checkpoint.
    """

    def __init__(self, model: Model, directory: Path) -> None:
        storage = KVStorage(_NUM_BLOCKS, BLOCK_SIZE, model.kv_shape, model.device)
        for pool in storage.pools:
            pool.blocks.fill_(0xFF)  # nothing may depend on what was never written
        self._runner = Runner(model, storage, TorchKernels(), num_state_slots=32)
        self._slots: dict[tuple[int, int], int] = {}  # of states, by prompt and position
        self._oracle = load_eager(directory)
        rng = np.random.default_rng(0)
        self._first = rng.integers(0, VOCAB_SIZE, _NUM_TOKENS).astype("<u4")
        self._second = np.concatenate([self._first[:_SHARED_TOKENS], rng.integers(0, VOCAB_SIZE, 50).astype("<u4")])
        self._expected = {id(tokens): self._eager(tokens) for tokens in (self._first, self._second)}
        self._free = iter(rng.permutation(_NUM_BLOCKS).astype(np.int32))
        self._answer: torch.Tensor | None = None  # of the whole first prompt, computed at once

    def require(self) -> None:
        """Compute two prompts cold, warm, with a hit that ends inside a block, in chunks and in one batch.

        Raises:
            AssertionError: an answer is not transformers', or depends on the cache in exact mode.
        """
        num_blocks = -(-_NUM_TOKENS // BLOCK_SIZE)
        cold = self._blocks(num_blocks)
        self._compare("cold", [(self._first, 0, _NUM_TOKENS, cold, None)])
        warm = np.concatenate([cold[:3], self._blocks(num_blocks - 3)])
        self._compare("warm", [(self._first, 3 * BLOCK_SIZE, _NUM_TOKENS, warm, None)])
        num_whole = _SHARED_TOKENS // BLOCK_SIZE
        inside = np.concatenate([cold[:num_whole], self._blocks(-(-self._second.size // BLOCK_SIZE) - num_whole)])
        if self._runner.states is None:
            copy = BlockCopy(int(cold[num_whole]), int(inside[num_whole]))
            self._compare("mid-block", [(self._second, _SHARED_TOKENS, self._second.size, inside, copy)])
        else:  # a hit in a model with states ends at a block boundary
            start = num_whole * BLOCK_SIZE
            self._slots[id(self._second), start] = self._slots[id(self._first), start]
            self._compare("after two blocks", [(self._second, start, self._second.size, inside, None)])
        chunked = self._blocks(num_blocks)
        for start, end in zip((0, *_ENDS), _ENDS, strict=False):
            self._compare("chunked", [(self._first, start, end, chunked, None)])
        self._compare(
            "batched",
            [
                (self._first, _NUM_TOKENS - 1, _NUM_TOKENS, chunked, None),
                (self._second, 0, 5, self._blocks(1), None),
                (self._second, _SHARED_TOKENS + 1, self._second.size, inside, None),
            ],
        )

    def _eager(self, tokens: np.ndarray) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self._oracle(torch.from_numpy(tokens.astype(np.int64))[None], use_cache=False).logits
        return logits[0]

    def _blocks(self, count: int) -> np.ndarray:
        return np.array([next(self._free) for _ in range(count)], dtype=np.int32)

    def _state(self, tokens: np.ndarray, start: int, end: int) -> ChunkState | None:
        """Continue from the state at `start`, and keep those that later chunks continue from. None without states."""
        if self._runner.states is None:
            return None
        positions = sorted({end, *(position for position in _STATE_POSITIONS if start < position < end)})
        source = self._slots[id(tokens), start] if start else None
        for position in positions:
            self._slots.setdefault((id(tokens), position), len(self._slots))
        return ChunkState(source, [(position, self._slots[id(tokens), position]) for position in positions])

    def _compare(self, way: str, parts: Sequence[tuple[np.ndarray, int, int, np.ndarray, BlockCopy | None]]) -> None:
        """Compute parts of prompts in one step, and compare the logits after each with transformers'.

        Args:
            way: how the prompts are computed, for error messages.
            parts: the tokens of a prompt, the start and the end of the part, its blocks, and a block to copy first.
        """
        chunks = [
            Chunk(
                tokens.tobytes(), start, end, blocks[: -(-end // BLOCK_SIZE)], copy, wants_logits=True,
                state=self._state(tokens, start, end),
            )
            for tokens, start, end, blocks, copy in parts
        ]  # fmt: skip
        result = self._runner.run(chunks)
        assert all(result.is_finite), way
        for (tokens, _, end, _, _), got in zip(parts, result.logits, strict=True):
            expected = self._expected[id(tokens)][end - 1]
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4, msg=lambda text: f"{way}: {text}")
            assert expected.std() > 0.01, f"{way}: the oracle's logits are too flat to tell right from wrong"
            if tokens is self._first and end == _NUM_TOKENS and self._runner.model.is_exact:
                self._answer = got if self._answer is None else self._answer
                assert torch.equal(got, self._answer), f"{way}: other bits than cold"
