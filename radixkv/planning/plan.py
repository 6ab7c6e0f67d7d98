"""Arithmetic of K/V memory: sequences that fit next to the weights, waste of blocks, savings of sharing and caching.

Counts are exact integers. A GiB is 2**30 bytes, and a GB is 10**9 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from radixkv.errors import ConfigError

GIB = 2**30
GB = 10**9


@dataclass(frozen=True, slots=True)
class BlockUse:
    """The blocks of one sequence. An empty sequence has none.

    Attributes:
        num_tokens: length of the sequence.
        block_size: tokens per block.

    Raises:
        ConfigError: tokens below 0, or a block size below 1.

    >>> use = BlockUse(num_tokens=35, block_size=16)
    >>> use.num_blocks, use.last_block_tokens, use.free_tokens
    (3, 3, 13)
    """

    num_tokens: int
    block_size: int

    def __post_init__(self) -> None:
        _require_at_least("num_tokens", self.num_tokens, 0)
        _require_at_least("block_size", self.block_size, 1)

    @property
    def num_blocks(self) -> int:
        """Blocks that the sequence needs, including a partly filled last one."""
        return -(-self.num_tokens // self.block_size)

    @property
    def last_block_tokens(self) -> int:
        """Tokens in the last block."""
        return self.num_tokens - max(0, self.num_blocks - 1) * self.block_size

    @property
    def free_tokens(self) -> int:
        """Unused token slots of the last block."""
        return self.num_blocks * self.block_size - self.num_tokens


@dataclass(frozen=True, slots=True)
class WindowedUse:
    """The blocks of one sequence in layers with a sliding window, where these have a pool of their own.

    Attributes:
        num_tokens: length of the sequence.
        block_size: tokens per block.
        window: tokens that a query sees, its own included.

    Raises:
        ConfigError: tokens below 0, or a block size or a window below 1.

    >>> WindowedUse(num_tokens=16_384, block_size=64, window=512).num_blocks
    9
    """

    num_tokens: int
    block_size: int
    window: int

    def __post_init__(self) -> None:
        _require_at_least("num_tokens", self.num_tokens, 0)
        _require_at_least("block_size", self.block_size, 1)
        _require_at_least("window", self.window, 1)

    @property
    def num_blocks(self) -> int:
        """Blocks that the next token needs: those that its window overlaps. The window may begin inside a block."""
        num_sequence_blocks = BlockUse(self.num_tokens, self.block_size).num_blocks
        return min(num_sequence_blocks, -(-(self.window - 1) // self.block_size) + 1)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device, and what it holds in addition to K/V.

    Attributes:
        total_bytes: memory of the device.
        weights_bytes: weights on the device; with tensor parallelism, the device's share.
        overhead_bytes: activations, CUDA context, graphs.

    Raises:
        ConfigError: a size below 0.

    >>> device = DeviceMemory(24 * GB, weights_bytes=16 * GB, overhead_bytes=1 * GB)
    >>> device.users(1_200_000_000), device.users(5 * GB)
    (5, 1)
    """

    total_bytes: int
    weights_bytes: int
    overhead_bytes: int = 0

    def __post_init__(self) -> None:
        _require_at_least("memory", self.total_bytes, 0)
        _require_at_least("weights", self.weights_bytes, 0)
        _require_at_least("overhead", self.overhead_bytes, 0)

    @property
    def kv_bytes(self) -> int:
        """Bytes left for K/V; 0 if weights and overhead do not fit."""
        return max(0, self.total_bytes - self.weights_bytes - self.overhead_bytes)

    def users(self, user_bytes: int) -> int:
        """Count the sequences whose K/V fits at the same time, if they share nothing.

        Args:
            user_bytes: K/V of one sequence on this device, at least 1.
        """
        _require_at_least("user_bytes", user_bytes, 1)
        return self.kv_bytes // user_bytes


@dataclass(frozen=True, slots=True)
class PrefixSharing:
    """K/V of a prefix that several requests share, each with its own tokens after it.

    Whole blocks of the prefix are stored once. A block in which the prefix ends is computed once too, but each request
    has its own copy of it.

    Attributes:
        num_requests: requests that hold their blocks at the same time, at least 1.
        prefix_tokens: length of the shared prefix.
        block_size: tokens per block.

    Raises:
        ConfigError: no request, tokens below 0, or a block size below 1.
    """

    num_requests: int
    prefix_tokens: int
    block_size: int

    def __post_init__(self) -> None:
        _require_at_least("requests", self.num_requests, 1)
        _require_at_least("shared_prefix", self.prefix_tokens, 0)
        _require_at_least("block_size", self.block_size, 1)

    @property
    def shared_blocks(self) -> int:
        """Blocks of the prefix that all requests use together."""
        return self.prefix_tokens // self.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks that hold the prefix: shared ones and copies."""
        blocks_per_request = BlockUse(self.prefix_tokens, self.block_size).num_blocks
        return self.shared_blocks + self.num_requests * (blocks_per_request - self.shared_blocks)

    @property
    def num_blocks_unshared(self) -> int:
        """Blocks that hold the prefix if each request has its own."""
        return self.num_requests * BlockUse(self.prefix_tokens, self.block_size).num_blocks

    @property
    def computed_tokens(self) -> int:
        """Prefix tokens that are computed: each of them once."""
        return self.prefix_tokens

    @property
    def computed_tokens_unshared(self) -> int:
        """Prefix tokens that are computed if each request computes them."""
        return self.num_requests * self.prefix_tokens


@dataclass(frozen=True, slots=True)
class DecodingCost:
    """Work of one multi-head attention layer while it decodes, without and with a K/V cache.

    The first new token needs the whole prompt either way. For each later token, a layer with a cache computes one row;
    without a cache it computes the whole sequence again. The counts include the four projections and the two GEMMs of
    attention, without savings from the causal mask, with two FLOPs per multiply-add.

    Attributes:
        prompt_tokens: tokens before the first new one, at least 1.
        new_tokens: decoded tokens, at least 1.
        hidden_size: query heads times head dimension.

    Raises:
        ConfigError: a size below 1.
    """

    prompt_tokens: int
    new_tokens: int
    hidden_size: int

    def __post_init__(self) -> None:
        _require_at_least("prompt_tokens", self.prompt_tokens, 1)
        _require_at_least("new_tokens", self.new_tokens, 1)
        _require_at_least("hidden_size", self.hidden_size, 1)

    @property
    def naive_flops(self) -> int:
        """FLOPs without a cache: step i, from 0, computes `prompt_tokens + i` rows over as many keys."""
        first_rows, last_rows = self.prompt_tokens, self.prompt_tokens + self.new_tokens - 1
        num_rows = (first_rows + last_rows) * self.new_tokens // 2
        num_pairs = _sum_of_squares(last_rows) - _sum_of_squares(first_rows - 1)
        return self._flops(num_rows, num_pairs)

    @property
    def cached_flops(self) -> int:
        """FLOPs with a cache: the prompt once; then step i, from 1, computes one row over `prompt_tokens + i` keys."""
        later_steps = self.new_tokens - 1
        later_keys = (2 * self.prompt_tokens + self.new_tokens) * later_steps // 2
        return self._flops(self.prompt_tokens + later_steps, self.prompt_tokens**2 + later_keys)

    @property
    def ratio(self) -> float:
        """FLOPs without a cache divided by FLOPs with one, at least 1. The ratio of times is lower in small layers."""
        return self.naive_flops / self.cached_flops

    def _flops(self, num_rows: int, num_pairs: int) -> int:
        """Return the FLOPs of the projections of some rows, and of attention over pairs of a row and a key."""
        projections = 4 * 2 * num_rows * self.hidden_size**2
        attention = 2 * 2 * num_pairs * self.hidden_size
        return projections + attention


def load_us(num_bytes: int, bytes_per_s: float) -> float:
    """Return the microseconds that a link takes to transfer `num_bytes`, without latency.

    Raises:
        ConfigError: `num_bytes` is below 0, or the bandwidth is not positive.
    """
    _require_at_least("num_bytes", num_bytes, 0)
    _require_positive("bandwidth", bytes_per_s)
    return num_bytes / bytes_per_s * 1e6


def recompute_us(num_parameters: float, flops_per_s: float) -> float:
    """Return the microseconds to compute one token's K/V again: two FLOPs per parameter, without attention.

    Args:
        num_parameters: active parameters per token.
        flops_per_s: rate that the device reaches. Its peak rate gives a lower bound.

    Raises:
        ConfigError: a number that is not positive.

    Source:
        Kaplan et al. (arXiv:2001.08361), section 2.1.
    """
    _require_positive("params", num_parameters)
    _require_positive("flops_per_s", flops_per_s)
    return 2 * num_parameters / flops_per_s * 1e6


def _sum_of_squares(last: int) -> int:
    return last * (last + 1) * (2 * last + 1) // 6


def _require_at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ConfigError(f"{name}: expected at least {minimum}, got {value}")


def _require_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name}: expected a positive number, got {value}")
