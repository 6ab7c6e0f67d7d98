"""The layout of a payload (the bytes of one block outside the pool), and of a range of layers in a payload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from radixkv.errors import InvalidRequest
from radixkv.kernels.kv_pool import KVPool
from radixkv.kernels.quantization import INT4, hadamard_size


class Layers(NamedTuple):
    """A range of layers: the first one, and their number."""

    first: int
    num: int


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """The layout of a payload: the stored elements ("values") of all layers, one after the other, then their scales.

    >>> layers = LayerBytes(num_layers=3, value_bytes=2, scale_bytes=1)
    >>> bytes(layers.cut(memoryview(b"aabbccxyz"), layers.range_of(1, 0)))
    b'bbccyz'

    Attributes:
        num_layers: layers that store K and V.
        value_bytes: bytes of the values of one layer.
        scale_bytes: bytes of the scales of one layer; 0 if there are none.
    """

    num_layers: int
    value_bytes: int
    scale_bytes: int

    @classmethod
    def of(cls, pool: KVPool) -> Self:
        """Return the sizes of a pool's payloads."""
        value_bytes = pool.values.shape[2:].numel() * pool.values.element_size()
        scale_bytes = 0 if pool.scales is None else pool.scales.shape[2:].numel() * pool.scales.element_size()
        return cls(pool.num_layers, value_bytes, scale_bytes)

    def range_of(self, first_layer: int, num_layers: int) -> Layers:
        """Validate a requested range of layers. With `num_layers` 0, it extends to the last layer.

        Raises:
            InvalidRequest: there are no such layers.
        """
        if not 0 <= first_layer < self.num_layers:
            raise InvalidRequest(
                f"first_layer: expected at most {self.num_layers - 1}, the last one, got {first_layer}"
            )
        num_left = self.num_layers - first_layer
        if num_layers > num_left:
            raise InvalidRequest(
                f"num_layers: expected at most {num_left} from layer {first_layer} on, got {num_layers}"
            )
        return Layers(first_layer, num_layers or num_left)

    def size_of(self, num_layers: int) -> int:
        """Return the bytes of a number of layers."""
        return num_layers * (self.value_bytes + self.scale_bytes)

    def cut(self, payload: memoryview, layers: Layers) -> memoryview:
        """Return the values of some layers, then their scales.

        Returns:
            The payload itself if all layers are requested; otherwise a copy, so that the other layers can be freed.
        """
        if layers.num == self.num_layers:
            return payload
        first = layers.first
        end = layers.first + layers.num
        values = payload[first * self.value_bytes : end * self.value_bytes]
        scales = payload[self.num_layers * self.value_bytes :]
        return memoryview(b"".join((values, scales[first * self.scale_bytes : end * self.scale_bytes])))


def payload_layout(pools: Sequence[KVPool], part_pools: Sequence[KVPool] = ()) -> str:
    """Describe the layout of a payload, for the fingerprint of stored blocks.

    The payload does not depend on the memory order of the pool.

    Args:
        pools, part_pools: as for `BlockMover`.
    """
    layout = "; then ".join(_layout_of(pool, is_only=len(pools) == 1) for pool in pools)
    if part_pools:
        part_layout = payload_layout(part_pools)
        if part_layout == layout:
            part_layout = "the same"
        num_windowed = sum(pool.num_layers for pool in part_pools)
        return f"{layout}; then {part_layout} of {num_windowed} windowed layers, if they have it"
    return layout


def _layout_of(pool: KVPool, *, is_only: bool) -> str:
    vectors = "tokens" if pool.is_latent else "2, heads, tokens"
    rows = "heads, tokens, key and value" if pool.dtype == INT4 else f"{vectors}, dim"
    layout = f"values [layers, {rows}], then scales [layers, {vectors}]"
    if not is_only:
        layout += f" of {pool.num_layers} layers of {pool.num_kv_heads} heads of {pool.head_dim}"
    return f"{layout}; values rotated in parts of {hadamard_size(pool.head_dim)}" if pool.rotates_values else layout
