"""The names of the namespaces whose blocks are on a disk, for the process after this one."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from radixkv.namespace import Namespace

_log = logging.getLogger(__name__)


class NamespaceNames:
    """A file with a line for each namespace: the key that its first blocks have as their parent, and its names.

    A line that is cut or not ours is left out: blocks of a namespace that nobody knows are of no use. Lines are
    appended without waiting for the disk.

    Args:
        path: of the file; made if there is none.

    Raises:
        OSError: it can't be read or written.

    Attributes:
        namespaces: by the key.
    """

    def __init__(self, path: Path) -> None:
        self.namespaces: dict[bytes, Namespace] = {}
        self._file = path.open("a+b", buffering=0)
        path.chmod(0o600)
        self._file.seek(0)
        data = self._file.read()
        for line in data.splitlines():
            try:
                root, *names = json.loads(line)
                model, tenant, adapter, salt = (str(name) for name in names)
                self.namespaces[bytes.fromhex(root)] = Namespace(model, tenant, adapter, salt)
            except (ValueError, TypeError):
                _log.warning("%s: expected the names of a namespace in each line, got something else", path)
        if data and not data.endswith(b"\n"):
            self._file.write(b"\n")

    def add(self, root: bytes, namespace: Namespace) -> None:
        """Add a namespace, unless it is there. Complexity: a write of one line the first time."""
        if root not in self.namespaces:
            self.namespaces[root] = namespace
            line = json.dumps([root.hex(), namespace.model, namespace.tenant, namespace.adapter, namespace.salt])
            self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
