"""The K/V memory of one model, on its device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from radixkv.errors import ConfigError
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import INT4, is_quantized
from radixkv.storage.kv_layout import KVFormat
from radixkv.storage.layer_groups import LayerGroups, LayerLocation

_FORMAT_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.int8: "int8",
    INT4: "k8v4",
}
_DTYPES_BY_FORMAT_NAME = {name: dtype for dtype, name in _FORMAT_NAMES.items()}


class KVHeads(NamedTuple):
    """K and V of one token in one layer.

    Attributes:
        num_kv_heads: number of KV heads.
        head_dim: elements of the key, and of the value, of one head.
    """

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KVShape:
    """K and V of one token in one model.

    >>> shape = KVShape.of_layers([KVHeads(8, 256), KVHeads(2, 512), KVHeads(8, 256)], torch.bfloat16)
    >>> shape.layers_by_heads, shape.of((1,)).token_bytes
    (((0, 2), (1,)), 4096)

    Attributes:
        num_layers: layers that store K and V.
        num_kv_heads: number of KV heads; in the first layer, if layers differ.
        head_dim: elements of the key, and of the value, of one head; in the first layer, if layers differ.
        dtype: data type of the elements.
        is_latent: whether one vector is key and value at once, as in latent attention (MLA).
        heads: the heads of each layer if layers differ; empty if all are alike.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    is_latent: bool = False
    heads: tuple[KVHeads, ...] = ()

    @classmethod
    def of_layers(cls, layers: Sequence[KVHeads], dtype: torch.dtype, *, is_latent: bool = False) -> KVShape:
        """Return the shape of a model from the heads of its layers, of which there is at least one."""
        return cls(len(layers), *layers[0], dtype, is_latent, tuple(layers) if len(set(layers)) > 1 else ())

    def of(self, layers: Sequence[int]) -> KVShape:
        """Return the shape of some of the layers; `layers` may be empty."""
        if not layers or not self.heads:
            return dataclasses.replace(self, num_layers=len(layers), heads=())
        return KVShape.of_layers([self.heads[layer] for layer in layers], self.dtype, is_latent=self.is_latent)

    @property
    def layers_by_heads(self) -> tuple[tuple[int, ...], ...]:
        """Groups of layers with the same heads, in the order of their first layers."""
        if not self.heads:
            return (tuple(range(self.num_layers)),)
        groups: dict[KVHeads, list[int]] = {}
        for layer, heads in enumerate(self.heads):
            groups.setdefault(heads, []).append(layer)
        return tuple(map(tuple, groups.values()))

    @property
    def format(self) -> KVFormat:
        """Format of the stored elements."""
        return KVFormat(_FORMAT_NAMES[self.dtype], has_scales=is_quantized(self.dtype))

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers, with scales."""
        if self.heads:
            return sum(self.of(layers).token_bytes for layers in self.layers_by_heads)
        num_vectors = self.num_layers * (1 if self.is_latent else 2) * self.num_kv_heads
        return self.format.bytes_of(num_vectors, num_vectors * self.head_dim)

    def stored_as(self, kv_dtype: str) -> KVShape:
        """Return the shape of the same K and V as the pool stores them.

        Args:
            kv_dtype: see `CacheConfig.kv_dtype`.

        Raises:
            ConfigError: K and V of this model can't be stored in that dtype.
        """
        if kv_dtype == "auto":
            return self
        for head_dim in (self.head_dim, *(heads.head_dim for heads in self.heads)):
            if kv_dtype == "k8v4" and head_dim % 2:
                raise ConfigError(f"cache.kv_dtype: expected an even head_dim for k8v4, got {head_dim}")
        if kv_dtype == "k8v4" and self.is_latent:
            raise ConfigError(
                "cache.kv_dtype: expected another format for a model with latents, each of which is key and value at "
                "once, got k8v4"
            )
        if kv_dtype == "bf16" and self.dtype == torch.float16:
            raise ConfigError("cache.kv_dtype: expected a model in float32 or bfloat16 for bf16, got float16")
        return dataclasses.replace(self, dtype=_DTYPES_BY_FORMAT_NAME[kv_dtype])


class KVStorage:
    """The memory of K/V blocks. Layers with K and V of different shapes have different pools, with the same block ids.

        layers that store every token     pools        [ block 0 )[ block 1 )[ block 2 )[ ...   num_blocks
                                                       [ block 0 )[ block 1 )[ block 2 )[ ...   of another shape
        windowed layers, if divided       part_pools   [ part 0 )[ part 1 )[ ...                num_parts

    Attributes:
        num_blocks: blocks of each pool.
        block_size: tokens per block.
        pools: the blocks, zeroed; one pool for each K/V shape.
        block_bytes: bytes of one block in all layers that store every token, with scales.
        groups: divides the layers into whole and windowed ones; None if all layers store every token.
        part_pools: the pools of the windowed layers; empty if all layers store every token.
        num_parts: parts of each of these pools.
        num_dedicated_parts: number of parts with memory of their own; the others share the memory of blocks. None if
            all parts have memory of their own.
        part_bytes: bytes of one part in all windowed layers, with scales.
        layer_locations: where each layer stores its K/V.
        kv_dtype: format of the stored elements, as `KVFormat` names it.

    Args:
        num_blocks, block_size: number of blocks, and tokens per block.
        shape: K and V of a token as the pools store them.
        device: where the pools are.
        is_by_layer: whether the memory is ordered by layer, see `KVPool`.
        groups, num_parts, num_dedicated_parts: see above.

    Raises:
        ConfigError: the device does not have enough memory.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        shape: KVShape,
        device: torch.device,
        *,
        is_by_layer: bool = False,
        groups: LayerGroups | None = None,
        num_parts: int = 0,
        num_dedicated_parts: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = groups
        self.num_parts = num_parts
        self.num_dedicated_parts = num_dedicated_parts
        whole, windowed = divided_layers(shape, groups)
        self.layer_locations = _layer_locations((*whole, *windowed), shape.num_layers)
        self.block_bytes = block_size * sum(shape.of(layers).token_bytes for layers in whole)
        self.part_bytes = block_size * sum(shape.of(layers).token_bytes for layers in windowed)
        self.kv_dtype = shape.format.name

        def allocate(num_pool_blocks: int, pool_shape: KVShape) -> KVPool:
            return KVPool.allocate(
                num_pool_blocks,
                pool_shape.num_layers,
                pool_shape.num_kv_heads,
                block_size,
                pool_shape.head_dim,
                dtype=pool_shape.dtype,
                device=device,
                # A pool without layers is layer-major: torch can't view blocks of 0 bytes with another dtype.
                is_by_layer=is_by_layer or not pool_shape.num_layers,
                is_latent=pool_shape.is_latent,
            )

        try:
            self.pools = tuple(allocate(num_blocks, shape.of(layers)) for layers in whole)
            self.part_pools = tuple(allocate(num_parts, shape.of(layers)) for layers in windowed)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise ConfigError(
                f"cache.capacity_tokens: {num_blocks * block_size} tokens need {self.num_bytes} bytes of K/V on "
                f"{device}, which can't be allocated"
            ) from error

    @property
    def pool(self) -> KVPool:
        """The pool, if there is only one."""
        (pool,) = self.pools
        return pool

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks, and of as many parts as can be used at the same time."""
        num_parts = self.num_parts if self.num_dedicated_parts is None else self.num_dedicated_parts
        return self.num_blocks * self.block_bytes + num_parts * self.part_bytes


class LayersByPool(NamedTuple):
    """The layers of each pool.

    Attributes:
        whole: the layers of each pool whose layers store every token; `((),)` if no layer does.
        windowed: the layers of each pool of windowed layers.
    """

    whole: tuple[tuple[int, ...], ...]
    windowed: tuple[tuple[int, ...], ...]


def divided_layers(shape: KVShape, groups: LayerGroups | None) -> LayersByPool:
    """Divide layers by their K/V shape, and by whether they store every token. Without `groups`, all layers do."""
    if groups is None:
        return LayersByPool(shape.layers_by_heads, ())

    def select(*, is_windowed: bool) -> tuple[tuple[int, ...], ...]:
        selected = (
            tuple(layer for layer in layers if groups.are_windowed[layer] == is_windowed)
            for layers in shape.layers_by_heads
        )
        return tuple(filter(None, selected))  # without the shapes that no selected layer has

    return LayersByPool(select(is_windowed=False) or ((),), select(is_windowed=True))


def _layer_locations(layers_by_pool: Sequence[Sequence[int]], num_layers: int) -> tuple[LayerLocation, ...]:
    locations = {
        layer: LayerLocation(pool, index)
        for pool, layers in enumerate(layers_by_pool)
        for index, layer in enumerate(layers)
    }
    return tuple(locations[layer] for layer in range(num_layers))
