"""Chooses the size of the pool: the configured one, or what fits into the device's memory next to the model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from radixkv.api.limits import longest_sequence
from radixkv.compute.forward import Chunk
from radixkv.compute.graphs.capturer import GraphCapturer
from radixkv.compute.runner import Runner
from radixkv.config import MAX_BLOCKS, CacheConfig, EngineConfig
from radixkv.errors import ConfigError
from radixkv.model.attention.interface import AttentionKernels
from radixkv.model.model import Model
from radixkv.startup.cgroups import cgroup_folders
from radixkv.storage.device_pool import KVShape, KVStorage
from radixkv.tokens import TOKEN_BYTES

# The longest sequence of the dry run, even if the model allows longer ones or states no limit.
_DRY_RUN_TOKENS = 131_072

# Bounds of the default pool on a CPU, which other programs use as well. The K/V of a small model may be many times as
# large as its weights: SmolLM2 135M in float32 has 0.5 GB of weights, and 131,072 tokens take 6 GB.
_MAX_CPU_POOL_BYTES = 2**30
_MAX_CPU_POOL_WEIGHT_FACTOR = 2  # times the size of the weights, if that is more
_MAX_CPU_POOL_SHARE = 0.5  # of the memory that is available after the model is loaded

_log = logging.getLogger(__name__)


def choose_num_blocks(
    model: Model,
    kernels: AttentionKernels,
    kv_shape: KVShape,
    cache: CacheConfig,
    engine: EngineConfig,
    capturer: GraphCapturer,
    memory: Callable[[], tuple[int, int]] | None = None,
) -> int:
    """Return the number of blocks of the pool.

    Without `cache.capacity_tokens`, the pool on a CPU has 131,072 tokens, or fewer to respect two bounds: its size is
    at most 1 GiB or twice the size of the weights, whichever is larger, and at most half of the available memory.

    Without `cache.capacity_tokens`, the pool on a GPU takes the rest of `cache.memory_share` of the GPU's memory, after
    the weights, other programs, adapters, CUDA graphs and the largest step. To measure the memory for CUDA graphs and
    for the largest step, the largest CUDA graph is captured, and the largest step is computed.

        total    [ other programs | weights | CUDA graphs | largest step | adapters | pool .... | 1 - memory_share )

    Args:
        model: the weights.
        kernels: the kernels that will serve the model.
        kv_shape: the shape and format of K and V in the pool.
        cache, engine: the configuration.
        capturer: captures CUDA graphs.
        memory: returns free and total bytes of a GPU; None to query it.

    Raises:
        ConfigError: on a GPU without `cache.capacity_tokens`, the largest step or not even one block fits.
    """
    if memory is None and model.device.type == "cuda":
        memory = torch.cuda.mem_get_info
    if cache.capacity_tokens is not None:
        return cache.num_blocks
    if memory is None:
        return _num_blocks_on_cpu(model, kv_shape, cache)
    torch.cuda.empty_cache()  # frees memory that loading needed; does nothing without a GPU
    storage = KVStorage(1, cache.block_size, kv_shape, model.device)
    # Capture comes first, since it also empties PyTorch's cache.
    graphs = capturer.capture(storage, longest_sequence(_DRY_RUN_TOKENS, model.max_tokens), only_largest=True)
    try:
        run_largest_step(model, kernels, storage, engine)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"engine.max_step_tokens: expected steps that {model.device} has memory for next to the model, got "
            f"{engine.step_tokens}"
        ) from error
    free_bytes, total_bytes = memory()
    del graphs
    block_bytes = cache.block_size * kv_shape.token_bytes
    adapter_bytes = 0 if model.adapted is None else model.adapted.adapters.max_bytes  # adapters are loaded later
    pool_bytes = free_bytes - adapter_bytes - (1 - cache.memory_share) * total_bytes
    num_blocks = min(int(pool_bytes // block_bytes), MAX_BLOCKS)
    if num_blocks < 1:
        raise ConfigError(
            f"cache.memory_share: expected a share of {total_bytes} bytes that leaves {block_bytes} for a block next "
            f"to model and steps, got {cache.memory_share}, which leaves {max(0, int(pool_bytes))}"
        )
    _log.info("%d of %d bytes of the GPU are free, enough for a pool of %d blocks", free_bytes, total_bytes, num_blocks)
    return num_blocks


def _num_blocks_on_cpu(model: Model, kv_shape: KVShape, cache: CacheConfig) -> int:
    block_bytes = cache.block_size * kv_shape.token_bytes
    weight_bytes = model.num_parameters * model.module.dtype.itemsize
    pool_bytes = max(_MAX_CPU_POOL_BYTES, _MAX_CPU_POOL_WEIGHT_FACTOR * weight_bytes)
    available = available_bytes()
    if available is not None:
        pool_bytes = min(pool_bytes, int(_MAX_CPU_POOL_SHARE * available))
    num_blocks: int = max(1, min(cache.num_blocks, pool_bytes // block_bytes))
    if num_blocks < cache.num_blocks:
        _log.info(
            "the pool has %d tokens and takes %.1f MB, next to a model of %.1f MB; cache.capacity_tokens sets another "
            "number",
            num_blocks * cache.block_size,
            num_blocks * block_bytes / 1e6,
            weight_bytes / 1e6,
        )
    return num_blocks


def reserve_step_memory(model: Model, kernels: AttentionKernels, storage: KVStorage, engine: EngineConfig) -> None:
    """Compute the largest step again, so that PyTorch's allocator holds the memory reserved by `choose_num_blocks`.

    Capturing a CUDA graph empties the allocator's cache. Without this step, another program could take that memory, and
    the first long prompt would wait for cudaMalloc. The contents of the pool's first block are lost.
    """
    try:
        run_largest_step(model, kernels, storage, engine)
    except torch.OutOfMemoryError:
        _log.warning(
            "no memory is left for a step of %d tokens: long prompts are computed in smaller steps", engine.step_tokens
        )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes of main memory that this process can still allocate; None if the system does not report them.

    This is the minimum of the available memory and of what the memory limits of the process's cgroup and of the cgroups
    above leave, for example those of a container or of a systemd unit.

    Args:
        root: the directory that holds `proc` and `sys`.
    """
    bounds = []
    with contextlib.suppress(OSError, LookupError, ValueError):
        bounds.append(_read_fields(root / "proc/meminfo")["MemAvailable:"] * 1024)
    for folder, is_version_2 in cgroup_folders("memory", root):
        limit, used = ("memory.max", "anon") if is_version_2 else ("memory.limit_in_bytes", "total_rss")
        with contextlib.suppress(OSError, LookupError, ValueError):  # memory.max may be the word "max"
            bounds.append(int((folder / limit).read_text()) - _read_fields(folder / "memory.stat")[used])
    return min(bounds, default=None)


def _read_fields(file: Path) -> dict[str, int]:
    """Parse lines with a name, a number and optionally a unit."""
    return {line.split()[0]: int(line.split()[1]) for line in file.read_text().splitlines()}


def run_largest_step(model: Model, kernels: AttentionKernels, storage: KVStorage, engine: EngineConfig) -> None:
    """Compute a step with the maximum number of tokens and requests, the first one at the end of the longest sequence.

    The allocator keeps the memory that the step needed, so that it is no longer free. The results have no meaning,
    since all requests use the first block for all positions. No sequence is longer than the model allows, since some
    models have no further positions. A step with many long sequences may need more memory; the engine then retries it
    with fewer tokens.
    """
    num_requests = min(engine.max_running_requests, engine.step_tokens)
    longest = longest_sequence(_DRY_RUN_TOKENS, model.max_tokens)
    chunks: list[Chunk] = []
    num_remaining_tokens = engine.step_tokens
    for num_later_requests in reversed(range(num_requests)):
        num_tokens = min(longest, num_remaining_tokens - num_later_requests)  # each later request needs a token
        end = num_tokens if chunks else longest
        chunks.append(first_block_chunk(end - num_tokens, end, storage.block_size))
        num_remaining_tokens -= num_tokens
    Runner(model, storage, kernels).run(chunks)


def first_block_chunk(start: int, end: int, block_size: int) -> Chunk:
    """Create a chunk that uses the first block for all positions."""
    return Chunk(
        tokens=bytes(end * TOKEN_BYTES),
        start=start,
        end=end,
        block_ids=np.zeros(-(-end // block_size), dtype=np.int32),
        copy=None,
        wants_logits=True,
    )
