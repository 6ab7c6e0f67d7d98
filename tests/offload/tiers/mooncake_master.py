"""A Mooncake master on loopback for tests."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.free_port import free_port
from tests.patience import PATIENCE_S, wait_until

os.environ.setdefault("GLOG_minloglevel", "3")


def why_not() -> str | None:
    """Return why Mooncake cannot be used here; None if it can."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:  # of the package, or of Debian's libibverbs1, which it needs even over TCP
        return f"expected mooncake-transfer-engine-non-cuda and libibverbs1, got: {error}"
    return None


WHY_NOT = why_not()


@contextlib.contextmanager
def mooncake_master(port: int, *settings: str, pids: list[int] | None = None) -> Iterator[str]:
    """Start a master, yield its address, and append its process id to `pids`."""
    package = importlib.util.find_spec("mooncake")
    assert package is not None
    assert package.origin is not None
    flags = [
        f"--rpc_port={port}",
        f"--metrics_port={free_port()}",
        "--rpc_address=127.0.0.1",
        "--metrics_host=127.0.0.1",
        *settings,
    ]
    command = [str(Path(package.origin).parent / "mooncake_master"), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if pids is not None:
        pids.append(process.pid)

    def answers() -> bool:
        assert process.poll() is None
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), PATIENCE_S):
            return True
        return False

    try:
        wait_until(answers)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(PATIENCE_S)
