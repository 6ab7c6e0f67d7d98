from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from bench.fleet.processes import descendants, listener_of, listeners

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(child.pid, flush=True)
input()
"""


def test_processes_of_processes_are_found() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert child in descendants(parent.pid)
        assert {parent.pid, child} <= descendants(os.getpid())
        assert os.getpid() not in descendants(os.getpid())
        parent.communicate("\n")


def test_who_listens_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listener_of(f"127.0.0.1:{port}", [os.getpid()]) == os.getpid()
        assert listeners([os.getpid()])[f"0100007F:{port:04X}"] == os.getpid()
    with pytest.raises(ProcessLookupError):
        listener_of(f"127.0.0.1:{port}", [os.getpid()])
