"""The K/V memory of one model, on its device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from radixkv.errors import ConfigError
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import INT4, is_quantized
from radixkv.storage.kv_layout import KVFormat
from radixkv.storage.layer_groups import LayerGroups

_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.int8: "int8",
    INT4: "int4",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class KVShape:
    """K and V of one token in one model.

    Attributes:
        num_layers: layers that store them.
        num_kv_heads: heads that K and V have.
        head_dim: numbers in the key, and in the value, of one head.
        dtype: of these numbers.
        is_latent: whether one vector is key and value at once, as in latent attention (MLA).
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    is_latent: bool = False

    @property
    def format(self) -> KVFormat:
        """Format of the stored numbers."""
        return KVFormat(_NAMES[self.dtype], has_scales=is_quantized(self.dtype))

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token, all layers, scales included."""
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
        if kv_dtype == "int4" and self.head_dim % 2:
            raise ConfigError(f"cache.kv_dtype: expected an even head_dim for int4, got {self.head_dim}")
        if kv_dtype == "bf16" and self.dtype == torch.float16:
            raise ConfigError("cache.kv_dtype: expected a model in float32 or bfloat16 for bf16, got float16")
        return dataclasses.replace(self, dtype=_DTYPES[kv_dtype])


class KVStorage:
    """Physical KV blocks.

        layers that store every token     pool     [ block 0 )[ block 1 )[ block 2 )[ ...   num_blocks
        windowed layers, if divided       parts    [ part 0 )[ part 1 )[ ...                num_parts

    Attributes:
        num_blocks: blocks of the pool.
        block_size: tokens a block.
        pool: the blocks, zeroed.
        block_bytes: bytes of one block, all layers that store every token, scales included.
        groups: the layers of both pools; None if all layers are in one.
        parts: the pool of the windowed layers; None if all layers are in one.
        num_parts: blocks of that pool.
        part_bytes: bytes of one of them.
        kv_dtype: format of the stored numbers, as `KVFormat` names it.

    Args:
        num_blocks, block_size: size of the pool.
        shape: K and V of a token as the pool stores them.
        device: where the pool is.
        is_by_layer: whether the memory is ordered by layer, see `KVPool`.
        groups: divides the layers; None for one pool.
        num_parts: blocks of the windowed layers' pool.

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
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = groups
        self.num_parts = num_parts
        whole = shape if groups is None else dataclasses.replace(shape, num_layers=groups.num_whole)
        windowed = dataclasses.replace(shape, num_layers=shape.num_layers - whole.num_layers)
        self.block_bytes = block_size * whole.token_bytes
        self.part_bytes = block_size * windowed.token_bytes
        self.kv_dtype = shape.format.name

        def allocate(number: int, shape: KVShape) -> KVPool:
            size = (number, shape.num_layers, shape.num_kv_heads, block_size, shape.head_dim)
            ordered = is_by_layer or not shape.num_layers  # torch can't view blocks of no bytes as numbers
            return KVPool.allocate(
                *size, dtype=shape.dtype, device=device, is_by_layer=ordered, is_latent=shape.is_latent
            )

        try:
            self.pool = allocate(num_blocks, whole)
            self.parts = None if groups is None else allocate(num_parts, windowed)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise ConfigError(
                f"cache.capacity_tokens: {num_blocks * block_size} tokens need {self.num_bytes} bytes of K/V on "
                f"{device}, which can't be allocated"
            ) from error

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks and parts."""
        return self.num_blocks * self.block_bytes + self.num_parts * self.part_bytes
