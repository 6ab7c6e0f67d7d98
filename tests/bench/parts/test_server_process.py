"""A server runs in a `with` block and is stopped after it, and a failure to start has a reason."""

from __future__ import annotations

import signal
import sys
import textwrap
from pathlib import Path

import pytest

from bench.parts.server_process import ServerProcess
from radixkv.errors import ConfigError
from tests.patience import wait_until

LISTEN = "print('listening on 127.0.0.1:4321', flush=True); time.sleep(3600)"


def python(code: str) -> list[str]:
    """Return a command that runs code in a Python that exits with 0 on SIGTERM."""
    prelude = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n"
    return [sys.executable, "-S", "-c", prelude + textwrap.dedent(code)]


def test_the_address_is_found_after_other_lines() -> None:
    server = ServerProcess(python(f"print('loading'); {LISTEN}"))
    with server as address:
        assert address == "127.0.0.1:4321"
        assert server.is_running
        assert server.pid is not None
        assert Path(f"/proc/{server.pid}").exists() or sys.platform != "linux"
    assert not server.is_running
    assert server.stop() == 0


def test_an_exception_inside_the_block_stops_the_server() -> None:
    server = ServerProcess(python(LISTEN))
    with pytest.raises(ZeroDivisionError), server:
        _ = 1 / 0
    assert server.stop() == 0


def test_a_server_that_ends_early_shows_its_status_and_stderr() -> None:
    server = ServerProcess(python("print('no such model', file=sys.stderr); sys.exit(3)"))
    with pytest.raises(ConfigError, match=r"(?s)got its end, with exit status 3; its stderr:\nno such model"), server:
        pass


def test_a_server_that_never_listens_is_stopped_and_reported() -> None:
    server = ServerProcess(python("time.sleep(3600)"), start_timeout_s=0.3)
    with pytest.raises(ConfigError, match=r"(?s)got nothing within 0.3 s; its stderr:\n\(nothing\)"), server:
        pass
    assert server.stop() in (0, -signal.SIGTERM), "the process may not have set its signal handler yet"


def test_a_server_that_ignores_sigterm_is_killed() -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    server = ServerProcess(python(ignore + LISTEN), stop_timeout_s=0.2)
    with server:
        pass
    assert server.stop() == -signal.SIGKILL


def test_a_server_that_writes_much_output_is_never_blocked() -> None:
    code = """
        print('listening on 127.0.0.1:1', flush=True)
        for stream in (sys.stdout, sys.stderr):
            stream.write('x' * 1_000_000 + chr(10))
            stream.flush()
        os._exit(7)
    """
    server = ServerProcess(python(code))
    with server:
        wait_until(lambda: not server.is_running)
    assert server.stop() == 7
