"""Checks that attention kernels compute correctly on this machine and, in exact mode, independently of the batch."""

from __future__ import annotations

import itertools
from typing import Literal

import numpy as np
import torch

from radixkv.errors import UnsupportedModel
from radixkv.kernels import reference
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.cancelling_inputs import CANCELLING_SCALE, sensitive_attention
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionKernels, AttentionKind, AttentionUse
from radixkv.model.attention.paged_step import PagedStep
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.model.refusals import SERVE_FAST, reason_of
from radixkv.storage.device_pool import KVShape

# Tokens of the trial: on a GPU more than the keys of one split, on a CPU more than the keys of one unit of
# `kernels/cpu/attention_plan.py`. The queries are more than one tile.
_NUM_TOKENS = {"cuda": 2600, "cpu": 650}
_NUM_QUERIES = 200

# The queries at which the second to the fifth part begin. The parts are: the first query alone; 17, 52 and 129 queries,
# some of which fill less than a tile and others more; and the last query alone, whose sums are the most sensitive to
# cancellation.
_CUTS = (1, 18, 70, 199)

# Maximum distance of a row from the reference, relative to the row's norm. It allows for rounding and for another order
# of sums.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-2}


def check_attention(kernels: AttentionKernels, use: AttentionUse) -> None:
    """Attend over a long prefix and compare with `kernels/reference.py`.

    The queries are computed in one step, and again in parts together with other requests. In exact mode both ways must
    also give bitwise identical results for inputs that are sensitive to cancellation. Slots that are not written hold
    NaN.

    Args:
        kernels: the kernels that will serve.
        use: the requirements of the model.

    Raises:
        UnsupportedModel: for at least one kind of layer, the kernels do not run, or the results differ.
    """
    for kind in use.kinds:
        _check_kind(_Trial(kernels, kind, use), kind, use)


def _check_kind(trial: _Trial, kind: AttentionKind, use: AttentionUse) -> None:
    dtype, shape = use.dtype, use.shape
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(trial.num_tokens, heads, shape.head_dim, generator=generator)
        for heads in (kind.num_query_heads, shape.num_kv_heads, shape.num_kv_heads)
    )
    name = f"attention over {shape.format.name} on {use.device}"
    scale = shape.head_dim**-0.5
    try:
        results = [trial.attend(query, key, value, scale=scale, cuts=cuts) for cuts in ((), _CUTS)]
    except Exception as error:  # compilers and drivers raise their own errors for dtypes that they do not support
        raise UnsupportedModel(f"{name}: does not run there: {reason_of(error)}") from error
    expected = trial.attend_reference(query, key, value, scale=scale)
    for result in results:
        distance = float(((result - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
        if not distance <= _TOLERANCE[dtype]:
            raise UnsupportedModel(
                f"{name}: expected a relative distance of at most {_TOLERANCE[dtype]} from the reference, "
                f"got {distance:.2g}"
            )
    if use.is_exact and not all(
        _parts_agree(trial, kind, shape, cancelling_sums) for cancelling_sums in ("values", "scores")
    ):
        raise UnsupportedModel(
            f"{name}: expected bitwise identical results in one step and in parts, got different ones; {SERVE_FAST}"
        )


def _parts_agree(
    trial: _Trial, kind: AttentionKind, shape: KVShape, cancelling_sums: Literal["values", "scores"]
) -> bool:
    """Return whether results in one step and in parts are bitwise identical, for cancellation-sensitive inputs."""
    inputs = sensitive_attention(
        cancelling_sums, trial.num_tokens, kind.num_query_heads, shape.num_kv_heads, shape.head_dim
    )
    # A latent pool stores one tensor as keys and values. Since all queries are zeros here, the keys change no score.
    if shape.is_latent and cancelling_sums == "values":
        query, _, value = inputs
        inputs = query, value, value
    in_one_step = trial.attend(*inputs, scale=CANCELLING_SCALE)
    in_parts = trial.attend(*inputs, scale=CANCELLING_SCALE, cuts=_CUTS)
    return torch.equal(in_one_step, in_parts)


class _Reference(TorchKernels):
    """Attention kernels that call the reference implementation."""

    def paged_attention(
        self, query: torch.Tensor, pool: KVPool, layer: int, batch: PagedBatch, scoring: Scoring
    ) -> torch.Tensor:
        return reference.paged_attention(query, pool, layer, batch, scoring)


class _Trial:
    """Runs the attention of the last `_NUM_QUERIES` queries over one layer of K and V."""

    def __init__(self, kernels: AttentionKernels, kind: AttentionKind, use: AttentionUse) -> None:
        self.num_tokens = _NUM_TOKENS[use.device.type]
        num_blocks = -(-self.num_tokens // use.block_size)
        size = (num_blocks, 1, use.shape.num_kv_heads, use.block_size, use.shape.head_dim)
        self._pool = KVPool.allocate(
            *size,
            dtype=use.shape.dtype,
            device=use.device,
            is_by_layer=kernels.prefers_layer_major_pool,
            is_latent=use.shape.is_latent,
        )
        self._pool.blocks.fill_(0xFF)  # NaN; in a pool of integers, the scales are NaN
        self._table = np.arange(num_blocks, dtype=np.int32)
        np.random.default_rng(0).shuffle(self._table[num_blocks // 2 :])  # half of the blocks are not adjacent
        self._kernels = kernels
        self._kind = kind
        self._dtype = use.dtype
        self._device = use.device

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        cuts: tuple[int, ...] = (),
    ) -> torch.Tensor:
        """Compute the attention of the last queries. With `cuts`, compute it in parts that begin at these positions.

        Each part is computed in a batch with two other requests, which use the same K/V.

        Returns:
            Float32 `[num_queries, num_query_heads, head_dim]`.
        """
        query, key, stored_value = self._to_device(query, key, value)
        self._write(self._kernels, key, stored_value)
        prefix_len = self.num_tokens - _NUM_QUERIES
        rows = []
        for first_query, end_query in itertools.pairwise([0, *cuts, _NUM_QUERIES]):
            num_queries, start, end = end_query - first_query, prefix_len + first_query, prefix_len + end_query
            if not cuts:
                rows.append(self._run(self._kernels, query[start:end], self._batch([num_queries], [end]), scale))
                continue
            # The first request computes tokens 0 to 6, and the third one the last 3 tokens of the prefix.
            packed = torch.cat((query[:7], query[start:end], query[prefix_len - 3 : prefix_len]))
            batch = self._batch([7, num_queries, 3], [7, end, prefix_len])
            rows.append(self._run(self._kernels, packed, batch, scale)[7:-3])
        return torch.cat(rows).float()

    def attend_reference(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float
    ) -> torch.Tensor:
        """Compute the attention of the last queries with the reference implementation."""
        query, key, stored_value = self._to_device(query, key, value)
        kernels = _Reference()
        self._write(kernels, key, stored_value)
        batch = self._batch([_NUM_QUERIES], [self.num_tokens])
        return self._run(kernels, query[-_NUM_QUERIES:], batch, scale).float()

    def _to_device(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Copy the inputs to the device. The value is None for a latent pool, whose keys are its values."""
        query, key, value = (tensor.to(self._device, self._dtype) for tensor in (query, key, value))
        return query, key, None if self._pool.is_latent else value

    def _write(self, kernels: AttentionKernels, key: torch.Tensor, value: torch.Tensor | None) -> None:
        PagedStep(self._pool, self._batch([self.num_tokens], [self.num_tokens]), kernels).write(0, key, value)

    def _run(self, kernels: AttentionKernels, query: torch.Tensor, batch: PagedBatch, scale: float) -> torch.Tensor:
        sinks = torch.linspace(-2, 4, self._kind.num_query_heads, device=self._device, dtype=self._dtype)
        scoring = Scoring(scale, self._kind.window, self._kind.softcap, sinks if self._kind.has_sinks else None)
        return PagedStep(self._pool, batch, kernels).read(0, query, scoring)

    def _batch(self, query_lens: list[int], kv_lens: list[int]) -> PagedBatch:
        tables = [self._table] * len(kv_lens)
        return PagedBatch.build(query_lens, kv_lens, tables, self._pool.block_size, self._device)
