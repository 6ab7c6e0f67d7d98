"""`radixkv serve` in a process that is forked from one which has imported the libraries: that is most of a start.

`test_end_to_end.py` and others start the command itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from radixkv.service.commands.cli import main
from tests.patience import PATIENCE_S

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(
    [
        "radixkv.service.server.metrics_port",
        "radixkv.service.server.optional_services",
        "radixkv.service.server.server",
        "radixkv.startup.build_engine",
        "transformers.models.llama.modeling_llama",
    ]
)


class ServerProcess:
    """A process of its own that serves."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Id of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process still runs."""
        if self._process.is_alive():
            os.kill(self.pid, number)

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end. Returns the exit status; None if it has not come in time."""
        self._process.join(timeout_s)
        return self._process.exitcode


@contextmanager
def serving(*arguments: str, log: Path = Path(os.devnull)) -> Iterator[tuple[ServerProcess, str]]:
    """Run `radixkv serve`; yields the process and its address. What it logs is written to a file."""
    printed, stdout = _FORKED.Pipe(duplex=False)
    process = _FORKED.Process(target=_serve, args=(arguments, stdout, log), daemon=True)
    process.start()
    server = ServerProcess(process)
    stdout.close()
    with printed, os.fdopen(os.dup(printed.fileno()), encoding="utf-8") as lines:
        try:
            line = lines.readline()
            assert line.startswith("listening on "), line
            yield server, line.removeprefix("listening on ").strip()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(PATIENCE_S)


def _serve(arguments: tuple[str, ...], stdout: Connection, log: Path) -> None:
    """Be `radixkv serve`, with these files as standard output and error."""
    with log.open("wb") as stderr:
        os.dup2(stdout.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
    stdout.close()
    sys.exit(main(["serve", "--port", "0", *arguments]))
