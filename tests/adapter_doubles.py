"""Test doubles for the device side of adapters. No file is read: the name of a directory represents its content."""

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
    """Stands in for the files of an adapter. Its digest is any string."""

    digest: str
    rank: int = 8
    num_bytes: int = 100
    invocation_token_ids: tuple[int, ...] | None = None

    def applies_from(self, tokens: bytes) -> int | None:
        """Return the position of the last invocation token; 0 if the adapter has none, None if it does not occur."""
        if self.invocation_token_ids is None:
            return 0
        (invocation_token_id,) = self.invocation_token_ids
        positions = np.flatnonzero(np.frombuffer(tokens, "<u4") == invocation_token_id)
        return int(positions[-1]) if positions.size else None


class AnyDirectory(AdapterDirectory):
    """Finds every directory, whether it exists or not."""

    def find(self, path: str) -> Path:
        return Path(path)


class FakeDevice:
    """Stands in for an AdapterDevice: holds digests instead of weights, and records the calls that change them.

    Attributes:
        held: the digests of the adapters whose weights are on the device.
        calls: the calls that changed `held`, in order.
        gate: `read` waits until it is set, as it is at first.
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
