"""Test doubles for the device side of adapters. The name of a directory represents its content."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from radixkv.engine.adapters.adapter_directory import AdapterDirectory
from radixkv.engine.adapters.adapters import AdapterSource
from radixkv.errors import InvalidAdapter
from tests.patience import PATIENCE_S


@dataclass(frozen=True)
class FakeFiles:
    """An adapter whose digest is a text."""

    digest: str
    rank: int = 8
    num_bytes: int = 100
    invocation_token_ids: tuple[int, ...] | None = None

    def applies_from(self, tokens: bytes) -> int | None:
        """Find the last invocation, which is of one token."""
        if self.invocation_token_ids is None:
            return 0
        (wanted,) = self.invocation_token_ids
        places = np.flatnonzero(np.frombuffer(tokens, "<u4") == wanted)
        return int(places[-1]) if places.size else None


class AnyDirectory(AdapterDirectory):
    """Finds every directory, whether it exists or not."""

    def find(self, path: str) -> Path:
        return Path(path)


class FakeDevice:
    """Holds digests, and records the calls that change it.

    Attributes:
        held: the digests that it holds.
        calls: the calls that changed it, in order.
        gate: reading waits for it.
    """

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.calls: list[tuple[str, str]] = []
        self.gate = threading.Event()
        self.gate.set()

    def add(self, files: FakeFiles) -> None:
        if files.digest not in self.held:
            self.calls.append(("add", files.digest))
        self.held.add(files.digest)

    def remove(self, digest: str) -> None:
        self.calls.append(("remove", digest))
        self.held.remove(digest)

    def is_on_device(self, digest: str) -> bool:
        return digest in self.held

    def read(self, directory: Path) -> FakeFiles:
        assert self.gate.wait(PATIENCE_S)
        if directory.name == "broken":
            raise InvalidAdapter("adapter_config.json: expected a file in the adapter's directory, got none")
        name, _, invocation = directory.name.partition("+")  # "one+7" is invoked by the token 7
        return FakeFiles(name, invocation_token_ids=(int(invocation),) if invocation else None)

    def source(self, max_adapters: int = 4) -> AdapterSource:
        return AdapterSource(max_adapters, self, self.read, AnyDirectory("/", ()))
