"""The K/V memory of one model, on its device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from radixkv.errors import ConfigError
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import INT4, is_quantized
from radixkv.storage.kv_layout import KVFormat

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

    Attributes:
        num_blocks: blocks of the pool.
        block_size: tokens a block.
        pool: the blocks, zeroed.
        block_bytes: bytes of one block, all layers, scales included.
        kv_dtype: format of the stored numbers, as `KVFormat` names it.

    Args:
        num_blocks, block_size: size of the pool.
        shape: K and V of a token as the pool stores them.
        device: where the pool is.
        is_by_layer: whether the memory is ordered by layer, see `KVPool`.

    Raises:
        ConfigError: the device does not have enough memory.
    """

    def __init__(
        self, num_blocks: int, block_size: int, shape: KVShape, device: torch.device, *, is_by_layer: bool = False
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.block_bytes = block_size * shape.token_bytes
        self.kv_dtype = shape.format.name
        size = (num_blocks, shape.num_layers, shape.num_kv_heads, block_size, shape.head_dim)
        try:
            self.pool = KVPool.allocate(
                *size, dtype=shape.dtype, device=device, is_by_layer=is_by_layer, is_latent=shape.is_latent
            )
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            raise ConfigError(
                f"cache.capacity_tokens: {num_blocks * block_size} tokens need {num_blocks * self.block_bytes} bytes "
                f"of K/V on {device}, which can't be allocated"
            ) from error
