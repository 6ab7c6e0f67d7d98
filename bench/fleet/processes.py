"""Finds the process that listens on an address."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_LISTENS = "0A"


def listeners(pids: Iterable[int]) -> dict[str, int]:
    """Return the process that listens on each address. Addresses are in hexadecimal, as Linux writes them."""
    owners: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for each in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    owners[os.readlink(each)] = pid
    result: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text("utf-8").splitlines()[1:]:
            fields = line.split()
            owner = owners.get(f"socket:[{fields[9]}]")
            if fields[3] == _LISTENS and owner is not None:
                result[fields[1]] = owner
    return result


def listener_of(address: str, pids: Iterable[int]) -> int:
    """Return the process that listens on `HOST:PORT`.

    Raises:
        ProcessLookupError: none of the processes does.
    """
    port = int(address.rpartition(":")[2])
    for local, pid in listeners(pids).items():
        if int(local.rpartition(":")[2], 16) == port:
            return pid
    raise ProcessLookupError(f"expected a process that listens on {address}, got none")
