"""Computes the bytes of K/V per token. Plain arithmetic, without a model or tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from radixkv.errors import ConfigError

# Bits per element; k8v4, which has keys in int8 and values in int4, has 6 on average.
_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "k8v4": 6, "fp4": 4, "int4": 4}
_SCALE_BYTES = 4  # float32
_BLOCKS_PER_PART = 8.0  # if all layers are windowed, so that blocks take no memory

# Names in `KVFormat` of the dtypes in config.json.
FORMAT_OF_DTYPE = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Format of the stored elements of K and V.

    Attributes:
        name: fp32, bf16, fp16, fp8, int8, k8v4, fp4 or int4.
        has_scales: whether every stored vector also has a float32 scale (only below 16 bits).

    Raises:
        ConfigError: an unknown name, or scales for a format of 16 bits or more.
    """

    name: str
    has_scales: bool = False

    def __post_init__(self) -> None:
        if self.name not in _BITS:
            raise ConfigError(f"dtype: expected one of {', '.join(_BITS)}, got {self.name}")
        if self.has_scales and self.bits >= 16:
            raise ConfigError(f"scales: expected a dtype below 16 bits, got {self.name}")

    @property
    def bits(self) -> int:
        """Bits per element, without scales; the mean of keys and values."""
        return _BITS[self.name]

    def bytes_of(self, num_vectors: int, num_elements: int) -> int:
        """Bytes of `num_elements` elements in `num_vectors` vectors with their scales, rounded up to a whole byte."""
        return -(-num_elements * self.bits // 8) + self.has_scales * num_vectors * _SCALE_BYTES


@dataclass(frozen=True, slots=True)
class HeadKV:
    """A key and a value for each KV head: multi-head (MHA), grouped-query (GQA) and multi-query attention (MQA).

    Attributes:
        num_layers: layers that store K and V; a layer with a sliding window counts as if it stored every token.
        num_kv_heads: number of KV heads.
        head_dim: elements of the key, and of the value, of one head.
        num_query_heads: query heads that read them, a multiple of `num_kv_heads`; None if unknown.

    Raises:
        ConfigError: a size below 1, or query heads that the KV heads do not divide.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_query_heads: int | None = None

    def __post_init__(self) -> None:
        _require_at_least("num_layers", self.num_layers, 1)
        _require_at_least("num_kv_heads", self.num_kv_heads, 1)
        _require_at_least("head_dim", self.head_dim, 1)
        if self.num_query_heads is not None:
            _require_at_least("num_query_heads", self.num_query_heads, 1)
            _require_multiple("num_query_heads", self.num_query_heads, "num_kv_heads", self.num_kv_heads)

    def __str__(self) -> str:
        return f"{self.num_layers} layers x 2 x {self.num_kv_heads} KV heads x {self.head_dim}"

    def token_bytes(self, kv_format: KVFormat) -> int:
        """Bytes of K and V of one token, all layers.

        >>> HeadKV(num_layers=32, num_kv_heads=8, head_dim=128).token_bytes(KVFormat("bf16"))
        131072
        """
        return self._bytes_of_heads(self.num_kv_heads, kv_format)

    def rank_token_bytes(self, kv_format: KVFormat, tensor_parallel: int) -> int:
        """Bytes of K and V of one token on the rank that stores the most; see `rank_kv_heads`."""
        return self._bytes_of_heads(self.rank_kv_heads(tensor_parallel), kv_format)

    def rank_kv_heads(self, tensor_parallel: int) -> int:
        """KV heads on the rank that stores the most.

        Query heads are divided evenly, and a rank stores the KV heads that its query heads read. Ranks that share a
        KV head each store a copy, so more ranks than KV heads save no memory.

        Raises:
            ConfigError: fewer than one rank, or the ranks do not divide the query heads.
        """
        _require_at_least("tp", tensor_parallel, 1)
        if self.num_query_heads is not None:
            _require_multiple("num_query_heads", self.num_query_heads, "tp", tensor_parallel)
        # Rank r reads KV heads [r * heads / ranks, (r + 1) * heads / ranks), rounded up to whole heads.
        # With heads / ranks in lowest terms, the worst case is a rank that starts (ranks - 1) / ranks into a head.
        divisor = math.gcd(self.num_kv_heads, tensor_parallel)
        heads = self.num_kv_heads // divisor
        ranks = tensor_parallel // divisor
        return -(-(heads + ranks - 1) // ranks)

    def _bytes_of_heads(self, num_kv_heads: int, kv_format: KVFormat) -> int:
        num_vectors = self.num_layers * 2 * num_kv_heads
        return kv_format.bytes_of(num_vectors, num_vectors * self.head_dim)


@dataclass(frozen=True, slots=True)
class LatentKV:
    """One latent and one rotary key for all heads together, stored as one vector: multi-head latent attention (MLA).

    Attributes:
        num_layers: layers that store latents.
        rank: elements of the latent, `kv_lora_rank`.
        rope_dim: elements of the rotary key, `qk_rope_head_dim`.

    Raises:
        ConfigError: a size below 1.

    Source:
        DeepSeek-V2 (arXiv:2405.04434), section 2.1.
    """

    num_layers: int
    rank: int
    rope_dim: int

    def __post_init__(self) -> None:
        _require_at_least("num_layers", self.num_layers, 1)
        _require_at_least("mla_rank", self.rank, 1)
        _require_at_least("rope_dim", self.rope_dim, 1)

    def __str__(self) -> str:
        return f"{self.num_layers} layers x (latent of {self.rank} + rotary key of {self.rope_dim})"

    def token_bytes(self, kv_format: KVFormat) -> int:
        """Bytes of one token, all layers."""
        return kv_format.bytes_of(self.num_layers, self.num_layers * (self.rank + self.rope_dim))

    def rank_token_bytes(self, kv_format: KVFormat, tensor_parallel: int) -> int:
        """Bytes of one token on one rank. The heads of every rank read the whole latent, so each stores all of it."""
        _require_at_least("tp", tensor_parallel, 1)
        return self.token_bytes(kv_format)


@dataclass(frozen=True, slots=True)
class MixedKV:
    """K and V of a model whose layers with a sliding window have other heads than its other layers.

    >>> layout = MixedKV(sliding=HeadKV(25, 8, 256), other=HeadKV(5, 2, 512))
    >>> layout.num_layers, layout.token_bytes(KVFormat("bf16"))
    (30, 225280)

    Attributes:
        sliding: layers with a sliding window of any size.
        other: layers without a sliding window.
    """

    sliding: HeadKV
    other: HeadKV

    def __str__(self) -> str:
        return f"{self.sliding} + {self.other}"

    @property
    def num_layers(self) -> int:
        """Layers of both kinds."""
        return self.sliding.num_layers + self.other.num_layers

    def token_bytes(self, kv_format: KVFormat) -> int:
        """Bytes of K and V of one token, all layers."""
        return self.sliding.token_bytes(kv_format) + self.other.token_bytes(kv_format)

    def rank_token_bytes(self, kv_format: KVFormat, tensor_parallel: int) -> int:
        """Bytes of K and V of one token on the rank that stores the most; see `HeadKV.rank_kv_heads`."""
        return sum(each.rank_token_bytes(kv_format, tensor_parallel) for each in (self.sliding, self.other))


KVLayout = HeadKV | LatentKV | MixedKV


class LayerShares(NamedTuple):
    """Capacities in tokens, relative to a single pool of all layers with the same memory.

    Attributes:
        windowed: capacity of the layers with a sliding window.
        other: capacity of the layers that store every token.
    """

    windowed: float
    other: float


def layer_shares(windowed: int, other: int) -> LayerShares:
    """Return the maximum capacities of windowed layers and of other layers that share their memory.

    Windowed layers never need more tokens than the other layers hold, so their maximum is the capacity of a single
    pool. The maximum of the other layers is reached if they have all of the memory. If all layers have a window, blocks
    take no memory, and there are eight times as many blocks as parts.

    >>> layer_shares(windowed=5, other=1)
    LayerShares(windowed=1.0, other=6.0)
    >>> layer_shares(windowed=32, other=0)
    LayerShares(windowed=1.0, other=8.0)

    Args:
        windowed, other: bytes per token in these layers, or their number if all layers store the same.
    """
    return LayerShares(1.0, (windowed + other) / other if other else _BLOCKS_PER_PART)


def attention_kinds(
    num_layers: int,
    num_query_heads: int,
    head_dim: int,
    *,
    num_kv_heads: int | None = None,
    latent: LatentKV | None = None,
) -> dict[str, KVLayout]:
    """Return the layout that a model would have with each kind of attention: MHA, GQA, MQA, MLA.

    Args:
        num_layers: layers that store K and V.
        num_query_heads: query heads.
        head_dim: elements of a key, and of a value, of one head.
        num_kv_heads: KV heads of GQA. If it is None, 1 or `num_query_heads`, the largest of 8, 4 and 2 that is less
            than `num_query_heads` and divides it is used; without one, the result does not contain GQA.
        latent: the layout of MLA. None uses the proportions of DeepSeek-V2: a latent of `4 * head_dim`, and a rotary
            key of `head_dim / 2`.
    """
    if num_kv_heads is None or num_kv_heads in (1, num_query_heads):
        num_kv_heads = next((n for n in (8, 4, 2) if n < num_query_heads and num_query_heads % n == 0), 1)
    kinds: dict[str, KVLayout] = {"MHA": HeadKV(num_layers, num_query_heads, head_dim, num_query_heads)}
    if num_kv_heads > 1:
        kinds["GQA"] = HeadKV(num_layers, num_kv_heads, head_dim, num_query_heads)
    kinds["MQA"] = HeadKV(num_layers, 1, head_dim, num_query_heads)
    kinds["MLA"] = latent or LatentKV(num_layers, 4 * head_dim, max(1, head_dim // 2))
    return kinds


def _require_at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ConfigError(f"{name}: expected at least {minimum}, got {value}")


def _require_multiple(name: str, value: int, unit_name: str, unit: int) -> None:
    if value % unit:
        raise ConfigError(f"{name}: expected a multiple of {unit_name} {unit}, got {value}")
