"""Saves the namespaces whose blocks are on a disk, so that the next process knows them."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Set
from io import FileIO
from pathlib import Path

from radixkv.namespace import Namespace

_log = logging.getLogger(__name__)


class NamespaceFile:
    """A file with a line per namespace: its root key, which is the parent of its first blocks, and its names.

    Truncated and invalid lines are skipped; blocks of an unknown namespace are useless. Lines are appended without
    syncing.

    Any thread may add and remove namespaces, which does not wait for the disk. The thread that writes blocks calls
    `write` before it writes them.

    Args:
        path: path of the file, which is created if it does not exist.

    Raises:
        OSError: the file can't be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # guards the dictionaries; not held during writes
        self._by_root: dict[bytes, Namespace] = {}
        self._unwritten: dict[bytes, Namespace] = {}
        self._file = _open(path)
        self._file.seek(0)
        data = self._file.read() or b""
        self._is_cut = bool(data) and not data.endswith(b"\n")  # whether the last line is incomplete
        lines = list(filter(None, data.splitlines()))
        for line in lines:
            try:
                root, *names = json.loads(line)
                model, tenant, adapter, salt = (str(name) for name in names)
                self._by_root[bytes.fromhex(root)] = Namespace(model, tenant, adapter, salt)
            except (ValueError, TypeError, RecursionError):
                _log.warning("%s: expected the names of a namespace on each line, got something else", path)
        # Counts lines that are invalid or duplicate, or whose namespaces were removed.
        self._num_useless = len(lines) - len(self._by_root)

    def __len__(self) -> int:
        return len(self._by_root)

    def by_root(self) -> dict[bytes, Namespace]:
        """Return all namespaces by their root key."""
        with self._lock:
            return dict(self._by_root)

    def add(self, root: bytes, namespace: Namespace) -> None:
        """Add a namespace if it is new. The next `write` writes it."""
        with self._lock:
            if root not in self._by_root:
                self._by_root[root] = self._unwritten[root] = namespace

    def write(self) -> None:
        """Append the namespaces that were added since the last call. If most lines are useless, rewrite the file.

        Raises:
            OSError: a write failed. The next call retries.
        """
        with self._lock:
            unwritten = dict(self._unwritten)
            is_mostly_useless = self._num_useless > len(self._by_root)
        if is_mostly_useless:
            self._replace_file()
            return
        for root, namespace in unwritten.items():
            self._append(_line(root, namespace))
            with self._lock:
                self._unwritten.pop(root, None)

    def keep(self, roots: Set[bytes]) -> None:
        """Remove all namespaces but these. The caller must know that the others have no blocks on the disk."""
        with self._lock:
            for root in [each for each in self._by_root if each not in roots]:
                del self._by_root[root]
                if self._unwritten.pop(root, None) is None:
                    self._num_useless += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, line: bytes) -> None:
        data = b"\n" + line if self._is_cut else line
        self._is_cut = True
        _write_all(self._file, data)
        self._is_cut = False

    def _replace_file(self) -> None:
        with self._lock:
            by_root = dict(self._by_root)
            num_useless = self._num_useless
        # The rename comes last, so that the old file stays in use if any step fails. With `replace_file`, the new file
        # would be opened after the rename; if that failed, names would be appended to a file that is deleted.
        partial = self._path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        new_file = _open(partial)
        try:
            _write_all(new_file, b"".join(_line(root, namespace) for root, namespace in by_root.items()))
            partial.replace(self._path)
        except OSError:
            new_file.close()
            raise
        self._file.close()
        self._file = new_file
        self._is_cut = False
        with self._lock:
            self._num_useless -= num_useless
            for root in by_root:
                self._unwritten.pop(root, None)


def _open(path: Path) -> FileIO:
    file = path.open("a+b", buffering=0)
    path.chmod(0o600)
    return file


def _write_all(file: FileIO, data: bytes) -> None:
    unwritten = memoryview(data)
    while unwritten:
        num_written = file.write(unwritten) or 0
        unwritten = unwritten[num_written:]


def _line(root: bytes, namespace: Namespace) -> bytes:
    names = (namespace.model, namespace.tenant, namespace.adapter, namespace.salt)
    return json.dumps([root.hex(), *names]).encode() + b"\n"
