"""The names of adapters, the contents to which they map, and the number of requests that use each content."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from radixkv.engine.adapters.adapter_device import AdapterWeights
from radixkv.errors import TooManyAdapters, UnknownAdapter

# Previous digests of a name that are remembered to explain misses.
_NUM_FORMER = 4
_MAX_REMEMBERED_NAMES = 4096


class ResolvedAdapter(NamedTuple):
    """The adapter to which a name maps.

    Attributes:
        digest: digest of its content; empty for the base model.
        former: previous digests of the name, the latest first.
        weights: the weights; None for the base model.
    """

    digest: str
    former: Sequence[str]
    weights: AdapterWeights | None = None


class AdapterRecord(NamedTuple):
    """The weights of an adapter that has a name or drains, and its last name."""

    weights: AdapterWeights
    last_name: str


@dataclass(slots=True)
class _Content:
    """The state of an adapter that has a name or drains.

    Attributes:
        record: its weights and its last name.
        names: its names, in the order in which they were assigned; none while it drains.
        num_unfinished: requests that use it.
    """

    record: AdapterRecord
    names: dict[str, None]
    num_unfinished: int = 0

    @property
    def has_drained(self) -> bool:
        return not self.names and not self.num_unfinished


_BASE = ResolvedAdapter("", ())


class AdapterNames:
    """Names, the contents to which they map, and the number of requests that use each content. Thread-safe.

        assign ─▶ named ── drop, or assign other content ▶ draining ── its last request ends ─▶ drained
                    ▲                                        │                                   │
                    └────────── assign it again ─────────────┘                      take_drained ▼ forgotten

    A request keeps the content to which its name mapped when it arrived.

    Args:
        max_adapters: distinct contents that may have names; at most twice as many may have names or drain.
    """

    def __init__(self, max_adapters: int) -> None:
        self.max_adapters = max_adapters
        self._lock = threading.Lock()  # guards what follows
        self._digests: dict[str, str] = {}  # by name
        self._contents: dict[str, _Content] = {}  # by digest
        self._former: OrderedDict[str, tuple[str, ...]] = OrderedDict()  # by name

    def find(self, name: str) -> ResolvedAdapter:
        """Return the adapter of a name. The empty name is the base model.

        Raises:
            UnknownAdapter: no adapter has this name.
        """
        if not name:
            return _BASE
        with self._lock:
            return self._find(name)

    def acquire(self, name: str) -> ResolvedAdapter:
        """Return the adapter of a name, and keep it until `release`.

        Raises:
            UnknownAdapter: no adapter has this name.
        """
        if not name:
            return _BASE
        with self._lock:
            resolved = self._find(name)
            self._contents[resolved.digest].num_unfinished += 1
            return resolved

    def release(self, digest: str) -> bool:
        """Release an acquired adapter. Returns whether it has drained."""
        if not digest:
            return False
        with self._lock:
            content = self._contents[digest]
            content.num_unfinished -= 1
            return content.has_drained

    def names_of(self, digest: str) -> tuple[str, ...]:
        """Return the names of a digest; none if it drains or is unknown."""
        with self._lock:
            content = self._contents.get(digest)
            return () if content is None else tuple(content.names)

    def require_room(self, name: str, digest: str) -> None:
        """Refuse to map a name to new content if too many contents would have names or drain.

        At most `max_adapters` contents may have names, and at most twice as many may have names or drain.

        Raises:
            TooManyAdapters: one of these limits would be exceeded.
        """
        with self._lock:
            named = {each for each, content in self._contents.items() if content.names.keys() - {name}} | {digest}
            if len(named) > self.max_adapters:
                raise TooManyAdapters(
                    f"adapters: expected at most {self.max_adapters} different ones (model.max_adapters), got one more"
                )
            if digest not in self._contents and len(self._contents) >= 2 * self.max_adapters:
                raise TooManyAdapters(
                    f"adapters: expected at most {2 * self.max_adapters} loaded and draining ones, twice "
                    "model.max_adapters, got one more; it can be loaded when one of them has drained"
                )

    def assign(self, name: str, weights: AdapterWeights) -> str | None:
        """Map a name to an adapter. Returns the previous digest of the name; None if it had none."""
        with self._lock:
            digest, replaced = weights.digest, self._digests.get(name)
            if replaced == digest:
                return replaced
            if replaced is not None:
                self._drop(name, replaced)
            content = self._contents.setdefault(digest, _Content(AdapterRecord(weights, name), {}))
            content.names[name] = None
            self._digests[name] = digest
            return replaced

    def drop(self, name: str) -> str:
        """Remove a name. Returns its digest.

        Raises:
            UnknownAdapter: no adapter has this name.
        """
        with self._lock:
            digest = self._find(name).digest
            self._drop(name, digest)
            return digest

    def take_drained(self) -> list[str]:
        """Return the digests of adapters that have drained, and forget these."""
        with self._lock:
            drained = [digest for digest, content in self._contents.items() if content.has_drained]
            for digest in drained:
                del self._contents[digest]
            return drained

    def listing(self) -> list[tuple[str, AdapterRecord, bool, int]]:
        """List each name, and the last name of each adapter that drains.

        Returns:
            Tuples of the name, the adapter, whether it drains, and the number of its unfinished requests.
        """
        with self._lock:
            return [
                (name, content.record, not content.names, content.num_unfinished)
                for content in self._contents.values()
                for name in (content.names or (content.record.last_name,))
            ]

    def _find(self, name: str) -> ResolvedAdapter:
        digest = self._digests.get(name)
        if digest is None:
            raise UnknownAdapter("adapter: expected the name of a loaded adapter, got an unknown one")
        former = tuple(each for each in self._former.get(name, ()) if each != digest)
        return ResolvedAdapter(digest, former, self._contents[digest].record.weights)

    def _drop(self, name: str, digest: str) -> None:
        content = self._contents[digest]
        del content.names[name]
        content.record = content.record._replace(last_name=name)
        del self._digests[name]
        former = (digest, *(each for each in self._former.get(name, ()) if each != digest))
        self._former[name] = former[:_NUM_FORMER]
        self._former.move_to_end(name)
        if len(self._former) > _MAX_REMEMBERED_NAMES:
            self._former.popitem(last=False)
