"""Store in Mooncake: a master, and memory that servers of the same model contribute."""

from __future__ import annotations

import ctypes
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from mooncake.store import MooncakeDistributedStore

from radixkv.config.address import host_and_port
from radixkv.errors import StoreUnavailable
from radixkv.offload.block_keys import KeyScope
from radixkv.offload.tiers.block_object import BlockObject
from radixkv.offload.tiers.block_store import Loan, PutOutcome, PutResult, StoreBackend, StoreSize

_PREFIX = "radixkv-1-"
# Values of Mooncake's ErrorCode.
_NO_ROOM = -200
_NOT_FOUND = -704
_NOT_READY = -703
_PROBE_S = 2.0
# Time limit of the trial connection. It is made by another process, which imports Mooncake first; this may take most of
# the time on a busy machine.
_TRIAL_S = 10.0
_TRIAL = """
import os, sys
from mooncake.store import MooncakeDistributedStore
code = MooncakeDistributedStore().setup(sys.argv[1], "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[2])
os._exit(1 if code else 0)
"""


class MooncakeStore(StoreBackend):
    """Objects in the memory of all servers, over TCP. The master evicts; this process contributes memory.

    The client connects at the first call. While the master is unavailable, each call waits for some seconds, and no
    time limit can be set, so this store must be used through a `GuardedStore`.

    Mooncake's calls release the GIL, except for those that connect and disconnect. If a master accepts connections but
    does not answer, these two would stop all threads of this process for up to 10 minutes. So another process connects
    first, and `close` abandons the connection if the master does not answer then.

    Args:
        master: `HOST:PORT` of the master.
        object_bytes: size of the largest object.
        lent_bytes: memory that this process contributes; 0 for none.
        buffer_bytes: memory for transfers, but at least that of four objects; a batch takes at most half of it.

    Raises:
        ConfigError: the address of the master is invalid.
    """

    def __init__(
        self, master: str, object_bytes: int, *, lent_bytes: int = 1 << 30, buffer_bytes: int = 256 << 20
    ) -> None:
        self._master = host_and_port("tiers.mooncake_master", master)
        self._object_bytes = object_bytes
        self._lent_bytes = lent_bytes
        self._buffer_bytes = max(buffer_bytes, 4 * object_bytes)
        self._max_batch_objects = self._buffer_bytes // 2 // object_bytes
        self._lock = threading.Lock()
        self._connected_client: Any = None

    def put(self, objects: Sequence[BlockObject], victims: Sequence[bytes] = ()) -> PutResult:
        """Store objects, except those of generation 0 whose key is stored. The master evicts, and ignores `victims`."""
        client = self._client()
        are_there = self.exists([each.key for each in objects])
        pairs = zip(objects, are_there, strict=True)
        return PutResult(tuple(self._put(client, each, is_there) for each, is_there in pairs))

    def get(self, keys: Sequence[bytes]) -> list[Loan | None]:
        """Return objects, each in its own memory."""
        client = self._client()
        loans: list[Loan | None] = [None] * len(keys)
        stored = [index for index, is_there in enumerate(self.exists(keys)) if is_there]
        for start in range(0, len(stored), self._max_batch_objects):
            indexes = stored[start : start + self._max_batch_objects]
            values = client.get_batch([_name(keys[index]) for index in indexes])
            for index, data in zip(indexes, values, strict=True):
                loans[index] = Loan(memoryview(data)) if data else None
        return loans

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether there is an object under each key.

        The master counts this as a use: it renews the leases of the objects, and evicts those first whose leases ended
        earliest. So this also serves as `touch`.
        """
        codes = self._client().batch_is_exist([_name(key) for key in keys]) if keys else []
        return [_require_code(code, 0, 1) == 1 for code in codes]

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete objects, for all servers."""
        codes = self._client().batch_remove([_name(key) for key in keys], True) if keys else []
        return sum(_require_code(code, 0, _NOT_FOUND, _NOT_READY) == 0 for code in codes)

    def purge(self, scope: KeyScope) -> int:
        """Delete all objects whose keys are in a scope, for all servers."""
        num_deleted: int = self._client().remove_by_regex(f"^{_PREFIX}{scope.hex_pattern('.')}", True)
        if num_deleted < 0:
            raise StoreUnavailable(f"tiers.mooncake_master: expected an answer, got Mooncake's code {num_deleted}")
        return num_deleted

    def size(self) -> StoreSize:
        """Return unknown sizes: only the master knows them."""
        return StoreSize(None, None, None)

    def close(self) -> None:
        """Withdraw the contributed memory, and the objects in it, if the master answers within 2 s."""
        with self._lock:
            client, self._connected_client = self._connected_client, None
        if client is None:
            return
        probe = threading.Thread(target=client.is_exist, args=(_PREFIX,), daemon=True)
        probe.start()
        probe.join(_PROBE_S)
        if probe.is_alive():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))  # its destructor would disconnect, too
        else:
            client.close()

    def _put(self, client: Any, block_object: BlockObject, is_there: bool) -> PutOutcome:
        if block_object.num_bytes > self._object_bytes:
            return PutOutcome.TOO_LARGE
        # The generation of the stored object is unknown, since the object would have to be read.
        if is_there and not block_object.generation:
            return PutOutcome.ALREADY_THERE
        code = _require_code(client.upsert_parts(_name(block_object.key), *block_object.pieces()), 0, _NO_ROOM)
        return PutOutcome.STORED if code == 0 else PutOutcome.NO_ROOM

    def _client(self) -> Any:
        with self._lock:
            if self._connected_client is None:
                self._connected_client = self._connect()
            return self._connected_client

    def _connect(self) -> Any:
        try:  # without this probe, the client would retry for 90 s
            with socket.create_connection(self._master, _PROBE_S) as probe:
                host = probe.getsockname()[0]
        except OSError as error:
            reason = f"{self._master[0]}:{self._master[1]}: {error.strerror or error}"
            raise StoreUnavailable(f"tiers.mooncake_master: expected a master, got {reason}") from error
        master = f"{self._master[0]}:{self._master[1]}"
        _try_connection(host, master)
        client = MooncakeDistributedStore()
        code = client.setup(host, "P2PHANDSHAKE", self._lent_bytes, self._buffer_bytes, "tcp", "", master)
        if code:
            raise StoreUnavailable(f"tiers.mooncake_master: expected a connection, got Mooncake's code {code}")
        return client


def _try_connection(host: str, master: str) -> None:
    """Connect to a master from another process.

    Raises:
        StoreUnavailable: the master does not answer, or refuses the connection.
    """
    trial = [sys.executable, "-c", _TRIAL, host, master]
    try:
        code = subprocess.run(trial, timeout=_TRIAL_S, capture_output=True, check=False).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StoreUnavailable(f"tiers.mooncake_master: expected an answer, got {type(error).__name__}") from error
    if code:
        raise StoreUnavailable("tiers.mooncake_master: expected a connection, got an error of Mooncake")


def _require_code(code: int, *expected: int) -> int:
    """Return Mooncake's code, and raise StoreUnavailable if it is none of the expected ones."""
    if code not in expected:
        raise StoreUnavailable(f"tiers.mooncake_master: expected an answer, got Mooncake's code {code}")
    return code


def _name(key: bytes) -> str:
    return _PREFIX + key.hex()
