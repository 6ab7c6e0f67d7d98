"""The device side of adapters, as far as the engine knows it."""

from __future__ import annotations

from typing import Any, Protocol


class AdapterWeights(Protocol):
    """An adapter that was read and checked, in host memory.

    Attributes:
        digest: of all that changes an answer.
        rank: the largest rank of its matrices.
        num_bytes: memory of its weights.
        invocation_token_ids: tokens from whose last occurrence on a prompt is the adapter's; None: all of it.
    """

    @property
    def digest(self) -> str:
        """Digest of all that changes an answer."""

    @property
    def rank(self) -> int:
        """Largest rank of its matrices."""

    @property
    def num_bytes(self) -> int:
        """Memory of its weights."""

    @property
    def invocation_token_ids(self) -> tuple[int, ...] | None:
        """Tokens that invoke it; None for an adapter of whole prompts."""

    def own_from(self, tokens: bytes) -> int | None:
        """Return the position from which on a prompt is the adapter's; None if all of it is the base model's."""


class AdapterDevice(Protocol):
    """The adapters whose weights the device may compute with. The engine's thread alone changes it."""

    def add(self, files: Any) -> None:
        """Hold an adapter, the `AdapterWeights` that were read for this device. Does nothing if it is held.

        Raises:
            InvalidAdapter, TooManyAdapters: there is no room for it.
        """

    def remove(self, digest: str) -> None:
        """Let go of an adapter that no request needs any more."""

    def is_on_device(self, digest: str) -> bool:
        """Whether the weights are in the device's memory now. From any thread."""
