"""What the engine needs from the device side of adapters."""

from __future__ import annotations

from typing import Any, Protocol


class AdapterWeights(Protocol):
    """An adapter that was read and checked, in host memory."""

    @property
    def digest(self) -> str:
        """Digest of everything that affects the output."""

    @property
    def rank(self) -> int:
        """Largest rank of its matrices."""

    @property
    def num_bytes(self) -> int:
        """Memory of its weights."""

    @property
    def invocation_token_ids(self) -> tuple[int, ...] | None:
        """The adapter applies from the last occurrence of these tokens on; None if it applies to all tokens."""

    def applies_from(self, tokens: bytes) -> int | None:
        """Return the position from which the adapter applies to a prompt; None if the base model computes all of it."""


class AdapterDevice(Protocol):
    """The adapters whose weights the device can use. Only the engine's thread changes it."""

    def add(self, files: Any) -> None:
        """Add the weights of an adapter, as they were read for this device. Does nothing if they were added before.

        Raises:
            InvalidAdapter, TooManyAdapters: there is no room for it.
        """

    def remove(self, digest: str) -> None:
        """Remove an adapter that no request needs any more."""

    def is_on_device(self, digest: str) -> bool:
        """Whether the weights are in device memory now. May be called from any thread."""
