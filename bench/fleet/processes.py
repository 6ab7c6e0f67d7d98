"""Finds the process that listens on an address."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

_LISTEN_STATE = "0A"  # of a socket in /proc/net/tcp


def listeners(pids: Iterable[int]) -> dict[str, int]:
    """Return the pid that listens on each address. Addresses are in hexadecimal, as in /proc/net/tcp."""
    pid_of_link: dict[str, int] = {}  # by the target of the descriptor's link, such as `socket:[INODE]`
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    pid_of_link[os.readlink(descriptor)] = pid
    pid_of_address: dict[str, int] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text("utf-8").splitlines()[1:]:
            fields = line.split()
            local_address, state, inode = fields[1], fields[3], fields[9]
            owner = pid_of_link.get(f"socket:[{inode}]")
            if state == _LISTEN_STATE and owner is not None:
                pid_of_address[local_address] = owner
    return pid_of_address


def listener_of(address: str, pids: Iterable[int]) -> int:
    """Return the pid of the process that listens on the port of `HOST:PORT`.

    Raises:
        ProcessLookupError: none of the processes listens on it.
    """
    port = int(address.rpartition(":")[2])
    for local_address, pid in listeners(pids).items():
        if int(local_address.rpartition(":")[2], 16) == port:
            return pid
    raise ProcessLookupError(f"expected a process that listens on {address}, got none")
