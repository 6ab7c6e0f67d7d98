"""The names of the namespaces whose blocks are on a disk, for the process after this one."""

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
    """A file with a line for each namespace: the key that its first blocks have as their parent, and its names.

    A line that is cut or not ours is left out: blocks of a namespace that nobody knows are of no use. Lines are
    appended without waiting for the disk.

    Any thread may add and forget names, and waits for nothing. The thread that writes blocks writes names before them.

    Args:
        path: of the file; made if there is none.

    Raises:
        OSError: it can't be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # of the names; no write is waited for with it
        self._names: dict[bytes, Namespace] = {}
        self._unwritten: dict[bytes, Namespace] = {}
        self._file = _opened(path)
        self._file.seek(0)
        data = self._file.read() or b""
        self._is_cut = bool(data) and not data.endswith(b"\n")  # the last line
        lines = list(filter(None, data.splitlines()))
        for line in lines:
            try:
                root, *names = json.loads(line)
                model, tenant, adapter, salt = (str(name) for name in names)
                self._names[bytes.fromhex(root)] = Namespace(model, tenant, adapter, salt)
            except (ValueError, TypeError):
                _log.warning("%s: expected the names of a namespace in each line, got something else", path)
        self._num_useless = len(lines) - len(self._names)  # lines of the file

    def __len__(self) -> int:
        return len(self._names)

    def known(self) -> dict[bytes, Namespace]:
        """Return all namespaces by their key."""
        with self._lock:
            return dict(self._names)

    def add(self, root: bytes, namespace: Namespace) -> None:
        """Add a namespace, unless it is there. It is written by the next `write`."""
        with self._lock:
            if root not in self._names:
                self._names[root] = self._unwritten[root] = namespace

    def write(self) -> None:
        """Write what was added since the last time. The file is written anew where most of its lines are of no use.

        Raises:
            OSError: the disk fails. The next call tries again.
        """
        with self._lock:
            unwritten = dict(self._unwritten)
            is_mostly_useless = self._num_useless > len(self._names)
        if is_mostly_useless:
            self._replace_file()
            return
        for root, namespace in unwritten.items():
            self._append(_line(root, namespace))
            with self._lock:
                self._unwritten.pop(root, None)

    def keep(self, roots: Set[bytes]) -> None:
        """Forget all other namespaces. Those of earlier processes must be known to have no blocks."""
        with self._lock:
            for root in [each for each in self._names if each not in roots]:
                del self._names[root]
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
            names, num_useless = dict(self._names), self._num_useless
        partial = self._path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        file = _opened(partial)
        try:
            _write_all(file, b"".join(_line(root, namespace) for root, namespace in names.items()))
            partial.replace(self._path)
        except OSError:
            file.close()
            raise
        self._file.close()
        self._file, self._is_cut = file, False
        with self._lock:
            self._num_useless -= num_useless
            for root in names:
                self._unwritten.pop(root, None)


def _opened(path: Path) -> FileIO:
    file = path.open("a+b", buffering=0)
    path.chmod(0o600)
    return file


def _line(root: bytes, namespace: Namespace) -> bytes:
    names = (namespace.model, namespace.tenant, namespace.adapter, namespace.salt)
    return json.dumps([root.hex(), *names]).encode() + b"\n"


def _write_all(file: FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) or 0 :]
