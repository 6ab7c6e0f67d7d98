"""Runs Python programs in processes forked from one that has imported the libraries, which saves most of a startup."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import IO, Any

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(
    [
        "radixkv.service.server.metrics_port",
        "radixkv.service.server.server",
        "radixkv.startup.build_engine",
        "transformers.models.llama.modeling_llama",
    ]
)


class ForkedProcess:
    """A running `python -m MODULE`, like `subprocess.Popen` with its output piped and without input.

    Args:
        command: `[sys.executable, "-m", MODULE, ...]`.
        stderr: file for its standard error.
        start_new_session: whether the process is detached from the terminal's Ctrl-C.
    """

    def __init__(
        self, command: Sequence[str], *, stderr: IO[Any], start_new_session: bool = False, **_: object
    ) -> None:
        python, option, *program = command
        assert (python, option) == (sys.executable, "-m")
        output, child_stdout = _FORKED.Pipe(duplex=False)
        child_stderr = Connection(os.dup(stderr.fileno()), readable=False)
        self._process = _FORKED.Process(
            target=_run,
            args=(program, child_stdout, child_stderr, start_new_session, os.getcwd(), dict(os.environ)),
            daemon=True,
        )
        self._process.start()
        for connection in (child_stdout, child_stderr):
            connection.close()
        with output:
            self.stdout = os.fdopen(os.dup(output.fileno()), encoding="utf-8")

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stdout.close()
        self.wait()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, or the negative number of the signal that ended the process; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end and return its exit status. Raises TimeoutExpired after `timeout` seconds."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("forked process", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal if the process still runs."""
        if self.returncode is None:
            # The process may have just ended, which `subprocess.Popen` ignores as well.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(
    program: list[str],
    stdout: Connection,
    stderr: Connection,
    start_new_session: bool,
    directory: str,
    environment: dict[str, str],
) -> None:
    """Run the program in this process, with the given standard output, standard error, directory and environment."""
    if start_new_session:
        os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for file_descriptor, connection in enumerate((stdout, stderr), start=1):
        os.dup2(connection.fileno(), file_descriptor)
        connection.close()
    sys.argv = program
    runpy.run_module(program[0], run_name="__main__", alter_sys=True)
