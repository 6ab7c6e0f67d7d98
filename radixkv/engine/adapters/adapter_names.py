"""The names of adapters, the content behind them, and who needs it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from radixkv.engine.adapters.adapter_device import AdapterWeights
from radixkv.errors import TooManyAdapters, UnknownAdapter

_NUM_FORMER = 4  # digests that a name stood for before; a miss is explained by no earlier ones
_MAX_REMEMBERED_NAMES = 4096


class ResolvedAdapter(NamedTuple):
    """The adapter behind a name.

    Attributes:
        digest: of its content; empty for the model itself.
        former: digests that the name stood for before, the latest first.
        files: what was read; None for the model itself.
    """

    digest: str
    former: Sequence[str]
    files: AdapterWeights | None = None


class AdapterRecord(NamedTuple):
    """An adapter that is named or drains: what was read, and its last name."""

    files: AdapterWeights
    last_name: str


@dataclass(slots=True)
class _Content:
    """An adapter that is named or drains.

    Attributes:
        known: what does not depend on its names and users.
        names: that stand for it, in the order in which they came; none while it drains.
        num_unfinished: requests that have it.
    """

    known: AdapterRecord
    names: dict[str, None]
    num_unfinished: int = 0

    @property
    def has_drained(self) -> bool:
        return not self.names and not self.num_unfinished


_BASE = ResolvedAdapter("", ())


class AdapterNames:
    """Names, the content behind them, and the number of requests that need it. Any thread may use it.

        assign ─▶ named ── drop, assign other content ─▶ draining ── its last request ends ─▶ drained
                    ▲                                        │                                   │
                    └────────── assign it again ─────────────┘                      take_drained ▼ forgotten

    A request keeps the content that its name stood for when it came.

    Args:
        max_adapters: different contents that may be named; as many more may drain.
    """

    def __init__(self, max_adapters: int) -> None:
        self.max_adapters = max_adapters
        self._lock = threading.Lock()  # guards what follows
        self._digests: dict[str, str] = {}  # by name
        self._contents: dict[str, _Content] = {}  # by digest
        self._former: OrderedDict[str, tuple[str, ...]] = OrderedDict()  # by name

    def find(self, name: str) -> ResolvedAdapter:
        """Return the adapter behind a name. The empty name stands for the model itself.

        Raises:
            UnknownAdapter: no adapter has this name.
        """
        if not name:
            return _BASE
        with self._lock:
            return self._find(name)

    def take(self, name: str) -> ResolvedAdapter:
        """Return the adapter behind a name, and keep it until `leave`.

        Raises:
            UnknownAdapter: no adapter has this name.
        """
        if not name:
            return _BASE
        with self._lock:
            found = self._find(name)
            self._contents[found.digest].num_unfinished += 1
            return found

    def leave(self, digest: str) -> bool:
        """Give back what `take` gave. Returns whether the adapter has drained with this."""
        if not digest:
            return False
        with self._lock:
            content = self._contents[digest]
            content.num_unfinished -= 1
            return content.has_drained

    def names_of(self, digest: str) -> tuple[str, ...]:
        """Return the names that stand for a digest; none if it drains or is not known."""
        with self._lock:
            content = self._contents.get(digest)
            return () if content is None else tuple(content.names)

    def require_room(self, name: str, digest: str) -> None:
        """Refuse a name for new content if as many different ones are named, or drain, as may.

        Raises:
            TooManyAdapters: the message names the key of the configuration.
        """
        with self._lock:
            named = {each for each, content in self._contents.items() if content.names.keys() - {name}} | {digest}
            if len(named) > self.max_adapters:
                raise TooManyAdapters(
                    f"adapters: expected at most {self.max_adapters} different ones (model.max_adapters), got one more"
                )
            if digest not in self._contents and len(self._contents) >= 2 * self.max_adapters:
                raise TooManyAdapters(
                    f"adapters: expected at most {self.max_adapters} that drain beside those loaded, got one more"
                )

    def assign(self, name: str, files: AdapterWeights) -> str | None:
        """Let a name stand for an adapter from now on. Returns the digest that it stood for before; None for none."""
        with self._lock:
            digest, replaced = files.digest, self._digests.get(name)
            if replaced == digest:
                return replaced
            if replaced is not None:
                self._drop(name, replaced)
            content = self._contents.setdefault(digest, _Content(AdapterRecord(files, name), {}))
            content.names[name] = None
            self._digests[name] = digest
            return replaced

    def drop(self, name: str) -> str:
        """Let a name stand for nothing. Returns the digest that it stood for.

        Raises:
            UnknownAdapter: no adapter has this name.
        """
        with self._lock:
            digest = self._find(name).digest
            self._drop(name, digest)
            return digest

    def take_drained(self) -> list[str]:
        """Return the digests that have drained, and forget them."""
        with self._lock:
            drained = [digest for digest, content in self._contents.items() if content.has_drained]
            for digest in drained:
                del self._contents[digest]
            return drained

    def listing(self) -> list[tuple[str, AdapterRecord, bool, int]]:
        """List names, and adapters that drain: the name, the adapter, whether it drains, and its requests."""
        with self._lock:
            return [
                (name, content.known, not content.names, content.num_unfinished)
                for content in self._contents.values()
                for name in (content.names or (content.known.last_name,))
            ]

    def _find(self, name: str) -> ResolvedAdapter:
        digest = self._digests.get(name)
        if digest is None:
            raise UnknownAdapter("adapter: expected the name of a loaded adapter, got an unknown one")
        former = tuple(each for each in self._former.get(name, ()) if each != digest)
        return ResolvedAdapter(digest, former, self._contents[digest].known.files)

    def _drop(self, name: str, digest: str) -> None:
        content = self._contents[digest]
        del content.names[name]
        content.known = content.known._replace(last_name=name)
        del self._digests[name]
        former = (digest, *(each for each in self._former.get(name, ()) if each != digest))
        self._former[name] = former[:_NUM_FORMER]
        self._former.move_to_end(name)
        if len(self._former) > _MAX_REMEMBERED_NAMES:
            self._former.popitem(last=False)
