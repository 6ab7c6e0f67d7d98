"""Simulates how long the programs of an attention plan keep a GPU's multiprocessors busy.

Run as `python -m tests.kernels.gpu.waves` for a table: the plan, the rule before `attention_splits`, and the best of
all fixed sizes. Costs are the estimates of `attention_splits`; only their ratio matters.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from radixkv.kernels.batch import PagedBatch
from radixkv.kernels.gpu.attention_plan import AttentionPlan, plan_attention
from radixkv.kernels.gpu.attention_splits import HOPPER, DeviceCapacity

_PROGRAM_US, _MERGE_US, _PARTIAL_US, _BYTES_PER_US = 3.0, 3.0, 0.5, 3e6
_PROGRAMS_BEFORE = 264

QUERY_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128

# (new tokens, cached tokens before them)
SHAPES = [
    *((16, 8192), (32, 8192), (64, 8192), (128, 8192), (64, 4096), (64, 12000), (64, 32768), (64, 65536)),
    *((128, 16384), (128, 32768), (256, 8192), (300, 6000), (512, 2048), (512, 8192), (1024, 4096)),
    *((2048, 8192), (2048, 32768), (8192, 0)),
]


class _Multiprocessor:
    """Programs that share a multiprocessor: the more there are, the longer each takes for a tile of 64 keys."""

    def __init__(self) -> None:
        self.now_us = 0.0
        # Of each program, what remains: microseconds before its first key, and tiles of keys.
        self.remaining: list[list[float]] = []

    def next_end_us(self, key_tile_us: float) -> float:
        """Return when the next program ends."""
        return self.now_us + min(start_us + tiles * key_tile_us for start_us, tiles in self.remaining)

    def advance(self, to_us: float, key_tile_us: float) -> None:
        passed_us = to_us - self.now_us
        for program in self.remaining:
            start_us = min(program[0], passed_us)
            program[0] -= start_us
            program[1] -= (passed_us - start_us) / key_tile_us
        self.remaining = [program for program in self.remaining if program[0] > 1e-9 or program[1] > 1e-9]
        self.now_us = to_us


def attention_us(plan: AttentionPlan, num_kv_heads: int, capacity: DeviceCapacity) -> float:
    """Return the simulated microseconds of a plan: its programs, in the order in which they start, and its merge."""
    cost = capacity.cost(plan.tile_rows)
    work = plan.work.numpy()
    first_key, end_key = work[:, 5], work[:, 6]
    key_tiles = (-(-(end_key - first_key) // 64)).tolist()
    waiting = (key_tiles * num_kv_heads)[::-1]  # key tiles of the programs that have not started, the next one last

    multiprocessors = [_Multiprocessor() for _ in range(capacity.num_multiprocessors)]
    for _, multiprocessor in itertools.product(range(cost.programs), multiprocessors):
        if waiting:
            multiprocessor.remaining.append([_PROGRAM_US, waiting.pop()])

    def key_tile_us(multiprocessor: _Multiprocessor) -> float:
        return float(cost.key_tile_us(len(multiprocessor.remaining)))

    # When the next program of each multiprocessor ends, and the index of the multiprocessor.
    heap = [
        (each.next_end_us(key_tile_us(each)), index) for index, each in enumerate(multiprocessors) if each.remaining
    ]
    heapq.heapify(heap)
    end_us = 0.0
    while heap:
        end_us, index = heapq.heappop(heap)
        multiprocessor = multiprocessors[index]
        multiprocessor.advance(end_us, key_tile_us(multiprocessor))
        while waiting and len(multiprocessor.remaining) < cost.programs:
            multiprocessor.remaining.append([_PROGRAM_US, waiting.pop()])
        if multiprocessor.remaining:
            heapq.heappush(heap, (multiprocessor.next_end_us(key_tile_us(multiprocessor)), index))
    return end_us + _merge_us(plan, num_kv_heads)


def _merge_us(plan: AttentionPlan, num_kv_heads: int) -> float:
    if not plan.num_partial_rows:
        return 0.0
    num_bytes = 2 * 4 * HEAD_DIM * num_kv_heads * plan.num_partial_rows  # float32, written and read
    return _MERGE_US + _PARTIAL_US * int(plan.merges[:, 4].max()) + num_bytes / _BYTES_PER_US


def batch_of(lens: Sequence[tuple[int, int]]) -> PagedBatch:
    """Build a batch of requests with `(new, cached)` tokens, which share no blocks."""
    query_lens = [new for new, _ in lens]
    kv_lens = [new + cached for new, cached in lens]
    ends = np.cumsum([-(-kv_len // 64) for kv_len in kv_lens])
    tables = np.split(np.arange(ends[-1], dtype=np.int32), ends[:-1])
    return PagedBatch.build(query_lens, kv_lens, tables, 64)


def plan(
    batch: PagedBatch, split_tokens: int | None, capacity: DeviceCapacity, tile_rows: int | None = None
) -> AttentionPlan:
    """Plan attention with 32 query heads over 8 KV heads in bfloat16."""
    heads = {"num_query_heads": QUERY_HEADS, "num_kv_heads": KV_HEADS, "dtype": torch.bfloat16}
    return plan_attention(batch, **heads, split_tokens=split_tokens, capacity=capacity, tile_rows=tile_rows)


def split_tokens_before(batch: PagedBatch, capacity: DeviceCapacity, tile_rows: int | None = None) -> int:
    """Return the split size by the rule before `attention_splits`.

    It is the power of two that cuts all keys into about 264 splits, at least 256.
    """
    work = plan(batch, 1 << 20, capacity, tile_rows).work
    num_keys = int((work[:, 6] - work[:, 5]).sum()) * KV_HEADS
    keys_per_program = -(-num_keys // _PROGRAMS_BEFORE)
    return max(256, 1 << (keys_per_program - 1).bit_length())


def best_us(batch: PagedBatch, capacity: DeviceCapacity, tile_rows: int | None = None) -> float:
    """Return the shortest time of all fixed split sizes."""
    max_kv_len = max(batch.kv_lens)
    sizes = {*range(256, min(4096, max_kv_len) + 1, 64), *range(4096, max_kv_len, 512), -(-max_kv_len // 64) * 64}
    return min(attention_us(plan(batch, size, capacity, tile_rows), KV_HEADS, capacity) for size in sizes)


def main() -> None:
    """Print the table."""
    capacity = HOPPER
    print("  new cached | rows programs before us | programs    us |  best us   loss before now")
    for (new, cached), tile_rows in itertools.product(SHAPES, (None, 128)):
        batch = batch_of([(new, cached)])
        now = plan(batch, None, capacity, tile_rows)
        if tile_rows is not None and now.tile_rows == plan(batch, None, capacity).tile_rows:
            continue
        before = plan(batch, split_tokens_before(batch, capacity, tile_rows), capacity, tile_rows)
        before_us, now_us = (attention_us(each, KV_HEADS, capacity) for each in (before, now))
        least_us = best_us(batch, capacity, tile_rows)
        print(
            f"{new:5} {cached:6} | {now.tile_rows:4} {len(before.work) * KV_HEADS:8} {before_us:9.1f} | "
            f"{len(now.work) * KV_HEADS:8} {now_us:5.1f} | {least_us:8.1f} {before_us / least_us - 1:8.0%} "
            f"{now_us / least_us - 1:6.0%}"
        )


if __name__ == "__main__":
    main()
