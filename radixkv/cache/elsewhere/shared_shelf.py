"""The books of a store that several servers share."""

from __future__ import annotations

from radixkv.api.retention import DEFAULT_PRIORITY
from radixkv.cache.elsewhere.shelf import Shelf
from radixkv.namespace import Namespace

_MOST_KNOWN_BLOCKS = 1 << 18  # about 80 MB


class SharedShelf(Shelf):
    """Knows some of the blocks that a shared store holds: those that this server stored, or has found there.

    The store gives up blocks by itself, and gets others from other servers. What is not known is to be asked for; what
    is known may be gone.

    Args:
        name: of the store, such as `redis`.
        num_blocks: blocks to know at most. Those that were used longest ago are forgotten, here and not in the store.
    """

    is_shared = True

    def __init__(self, name: str, num_blocks: int = _MOST_KNOWN_BLOCKS) -> None:
        super().__init__(name, num_blocks)

    def add(self, key: bytes, namespace: Namespace, priority: int = DEFAULT_PRIORITY) -> bytes | None:
        """Take a block that is not known here. Returns None: the store makes room by itself."""
        super().add(key, namespace)
        return None

    def note_left(self, key: bytes, priority: int = DEFAULT_PRIORITY) -> None:
        """Note that a block left the device. The store knows no priorities."""
        super().note_left(key)
