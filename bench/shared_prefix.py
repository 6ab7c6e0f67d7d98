"""Measures attention on a CPU over a prefix in shared blocks, compared with the same prefix in blocks of each request.

python -m bench.shared_prefix --json bench/results/shared_prefix.json

One layer is computed with the kernels that the service uses. The column `fused` is torch's fused attention, called for
each request over contiguous K and V. Before anything is timed, the outputs over shared blocks must be bitwise identical
to those over separate blocks, and close to those of torch.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.parts.result_file import write_result
from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.interface import AttentionKind, AttentionUse
from radixkv.model.on_cpu import cpu_candidates
from radixkv.storage.device_pool import KVShape

_BLOCK_SIZE = 64
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # maximum difference from torch's fused attention

Row = dict[str, Any]


class SharedPrefixCase:
    """Requests that compute new tokens after a shared prefix, and after some tokens of their own.

    Args:
        num_requests: requests of the step.
        prefix_tokens: tokens that they share, a multiple of the block size.
        own_tokens: tokens of each request after the prefix, including the new ones.
        new_tokens: tokens of each request that the step computes.
        heads: query heads, KV heads, and dimensions of a head.
        dtype: dtype of queries, keys and values.
    """

    def __init__(
        self,
        num_requests: int,
        prefix_tokens: int,
        own_tokens: int,
        new_tokens: int,
        heads: tuple[int, int, int],
        dtype: torch.dtype,
    ) -> None:
        num_query_heads, num_kv_heads, head_dim = heads
        prefix_blocks, own_blocks = prefix_tokens // _BLOCK_SIZE, -(-own_tokens // _BLOCK_SIZE)
        blocks_per_request = prefix_blocks + own_blocks
        torch.manual_seed(0)
        self.query = torch.randn(num_requests * new_tokens, num_query_heads, head_dim).to(dtype)
        pool_size = (num_requests * blocks_per_request, 1, num_kv_heads, _BLOCK_SIZE, head_dim)
        self._pool = KVPool.allocate(*pool_size, dtype=dtype, is_by_layer=True)
        self._pool.values.normal_()
        tables = np.arange(num_requests * blocks_per_request, dtype=np.int32).reshape(num_requests, blocks_per_request)
        for table in tables[1:]:  # the separate blocks have the same prefix
            self._pool.values[table[:prefix_blocks]] = self._pool.values[:prefix_blocks]
        query_and_kv_lens = [new_tokens] * num_requests, [prefix_tokens + own_tokens] * num_requests
        self._separate = PagedBatch.build(*query_and_kv_lens, list(tables), _BLOCK_SIZE)
        shared_tables = tables.copy()
        shared_tables[:, :prefix_blocks] = tables[0, :prefix_blocks]
        self._shared = PagedBatch.build(*query_and_kv_lens, list(shared_tables), _BLOCK_SIZE)
        self._scoring = Scoring(head_dim**-0.5)
        shape = KVShape(1, num_kv_heads, head_dim, dtype)
        kinds = (AttentionKind(num_query_heads, window=None, softcap=None),)
        use = AttentionUse(kinds, dtype, shape, _BLOCK_SIZE, torch.device("cpu"), is_exact=True)
        # By whether blocks are shared: each variant has kernels of its own, which keep the plan of its batch.
        self._kernels = {is_shared: next(iter(cpu_candidates(use).values())) for is_shared in (True, False)}
        # K and V of each request for torch's attention: [2, num_requests, num_kv_heads, num_keys, head_dim].
        kv = self._pool.values[torch.from_numpy(tables).long(), 0].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        self._contiguous_kv = kv[:, :, :, : prefix_tokens + own_tokens].contiguous()
        self._new_tokens = new_tokens

    def attend(self, *, is_shared: bool) -> torch.Tensor:
        """Attend over shared blocks, or over separate blocks for each request."""
        batch = self._shared if is_shared else self._separate
        return self._kernels[is_shared].paged_attention(self.query, self._pool, 0, batch, self._scoring)

    def attend_contiguous(self) -> torch.Tensor:
        """Call torch's fused attention for each request."""
        num_keys = self._contiguous_kv.shape[3]
        visible = torch.ones(self._new_tokens, num_keys, dtype=torch.bool).tril_(num_keys - self._new_tokens)
        queries = torch.split(self.query, self._new_tokens)
        return torch.cat(
            [
                scaled_dot_product_attention(
                    query.transpose(0, 1)[None], key[None], value[None], visible, enable_gqa=True
                )[0].transpose(0, 1)
                for query, key, value in zip(queries, *self._contiguous_kv, strict=True)
            ]
        )


def measure(case: SharedPrefixCase, rounds: int) -> Row:
    """Return medians of CPU time in milliseconds, over rounds that alternate between the variants."""
    if not torch.equal(case.attend(is_shared=True), case.attend(is_shared=False)):
        raise SystemExit("shared blocks: the bits differ from those with separate blocks")
    error = (case.attend(is_shared=True).float() - case.attend_contiguous().float()).abs().max().item()
    if not error < _TOLERANCE[case.query.dtype]:
        raise SystemExit(
            f"shared blocks: expected the output of torch's fused attention, got a difference of {error:.2g}"
        )
    variants: dict[str, Callable[[], torch.Tensor]] = {
        "shared_ms": lambda: case.attend(is_shared=True),
        "apart_ms": lambda: case.attend(is_shared=False),
        "fused_ms": case.attend_contiguous,
    }
    times_ms: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, attend in variants.items():
            start_s = time.thread_time()
            attend()
            times_ms[name].append((time.thread_time() - start_s) * 1e3)
    return {name: statistics.median(samples_ms) for name, samples_ms in times_ms.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description="Measure attention on a CPU over a shared prefix.")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prefixes", type=int, nargs="+", default=[2048, 8192], help="shared tokens")
    parser.add_argument("--own", type=int, default=100, help="tokens of each request after the prefix; default 100")
    parser.add_argument("--new", type=int, nargs="+", default=[1, 64], help="new tokens of each request")
    parser.add_argument("--heads", type=int, nargs=3, default=[14, 2, 64], help="query heads, KV heads, head dim")
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # so that the CPU time of one thread is the whole time
    rows = []
    # "apart": each request has separate blocks for the prefix.
    print("dtype     requests  prefix  new  shared, ms  apart, ms  fused, ms  shared / apart  shared / fused")
    for dtype, prefix, num_requests, new in itertools.product(
        options.dtypes, options.prefixes, options.requests, options.new
    ):
        case = SharedPrefixCase(num_requests, prefix, options.own, new, tuple(options.heads), getattr(torch, dtype))
        row = {"dtype": dtype, "requests": num_requests, "prefix_tokens": prefix, "new_tokens": new}
        row |= measure(case, options.rounds)
        rows.append(row)
        shared, apart, fused = row["shared_ms"], row["apart_ms"], row["fused_ms"]
        print(
            f"{dtype:9} {num_requests:8} {prefix:7} {new:4} {shared:11.2f} {apart:10.2f} {fused:10.2f} "
            f"{shared / apart:15.2f} {shared / fused:15.2f}",
            flush=True,
        )
    shape = dict(zip(("num_query_heads", "num_kv_heads", "head_dim"), options.heads, strict=True))
    result = {"rows": rows, **shape, "own_tokens": options.own}
    write_result(options.json, "bench.shared_prefix", arguments, result)


if __name__ == "__main__":
    main()
