"""Divides layers into those that store every token, and windowed layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class LayerLocation(NamedTuple):
    """The pool of a layer, and its index there.

    Attributes:
        pool: index in the list of all pools: first the block pools, then the pools of parts.
        layer: index of the layer among the layers of that pool.
    """

    pool: int
    layer: int


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layers of a model in two groups: windowed layers, whose queries see a window, and all others.

    >>> groups = LayerGroups.of((512, None, 512), max_tokens=4096)
    >>> groups.num_windowed, groups.window
    (2, 512)
    >>> groups.are_windowed
    (True, False, True)

    Attributes:
        are_windowed: whether each layer is windowed, and so stores parts (`radixkv/cache/windowed_layers.md`).
        window: the largest window of the windowed layers, in tokens; 0 if there are none.
    """

    are_windowed: tuple[bool, ...]
    window: int

    @classmethod
    def of(cls, windows: Sequence[int | None], max_tokens: int | None) -> LayerGroups:
        """Divide layers by their windows.

        Args:
            windows: tokens that a query of each layer sees, its own included; None for all.
            max_tokens: length of the longest sequence; None if unlimited. A layer is windowed if its window is shorter.
        """
        are_windowed = tuple(window is not None and (max_tokens is None or window < max_tokens) for window in windows)
        windows_in_use = [
            window
            for window, is_windowed in zip(windows, are_windowed, strict=True)
            if is_windowed and window is not None
        ]
        return cls(are_windowed, max(windows_in_use, default=0))

    @property
    def num_windowed(self) -> int:
        """Number of windowed layers."""
        return sum(self.are_windowed)
