"""A server process that is started for one benchmark and stopped with it."""

from __future__ import annotations

import abc
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from radixkv.errors import ConfigError

_LISTENING = re.compile(r"listening on (\S+:\d+)\s*$")
_SHOWN_LOG_BYTES = 4000


def serve_command(model: str | None, device: str | None, settings: Sequence[str]) -> list[str]:
    """Build the command that serves on a free local port, with this Python interpreter."""
    command = [sys.executable, "-m", "radixkv.service", "serve", "--port", "0"]
    if model is not None:
        command += ["--model", model]
    if device is not None:
        command += ["--device", device]
    for setting in settings:
        command += ["--set", setting]
    return command


def null_service_command(settings: Sequence[str], *options: str) -> list[str]:
    """Build the command that serves on a free local port with a model that takes no time; see `null_service`."""
    command = [sys.executable, "-m", "bench.parts.null_service", "engine", *options]
    for setting in settings:
        command += ["--set", setting]
    return command


def echo_command(answer: bytes) -> list[str]:
    """Build the command of an echo server that answers each request with this serialized response."""
    return [sys.executable, "-m", "bench.parts.null_service", "echo", answer.hex()]


def end_of_log(log: IO[bytes]) -> str:
    """Return the end of what a process has written to a file."""
    num_bytes = log.seek(0, os.SEEK_END)
    log.seek(max(0, num_bytes - _SHOWN_LOG_BYTES))
    return log.read().decode(errors="replace").strip() or "(nothing)"


class LoggedProcess(abc.ABC):
    """A subprocess as a context manager. The process ends with the `with` statement, also after an exception.

    The process has its own session, so Ctrl-C at the terminal reaches only the benchmark, which then stops the process
    with SIGTERM.

    Args:
        stop_timeout_s: how long the process may take to end after SIGTERM, in seconds.
    """

    def __init__(self, stop_timeout_s: float) -> None:
        self._stop_timeout_s = stop_timeout_s
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop(); a pipe could fill up
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> str:
        """Start the process and wait until it is ready.

        Returns:
            Its address.

        Raises:
            ConfigError: the process cannot be started, ended, or was not ready in time. In the last two cases the
                message ends with its log.
        """
        try:
            return self._start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> int | None:
        """Send SIGTERM, wait, and kill the process after a timeout. May be called again.

        Returns:
            The exit status; None if the process never started.
        """
        process = self._process
        if process is not None:
            try:
                process.terminate()
                process.wait(self._stop_timeout_s)
            except subprocess.TimeoutExpired:
                pass
            finally:  # also on a second Ctrl-C
                process.kill()
                process.wait()
        self._log.close()
        return None if process is None else process.returncode

    @abc.abstractmethod
    def _start(self) -> str:
        """Set `_process` to the process, and return its address when it is ready. Raises like `__enter__`."""


class ServerProcess(LoggedProcess):
    """A server subprocess, whose address in a `with` statement is the `HOST:PORT` on which it listens."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        start_timeout_s: float = 180.0,
        stop_timeout_s: float = 40.0,
        checkout: Path | None = None,
    ) -> None:
        """Describe the process; `__enter__` starts it.

        Args:
            command: for example that of `serve_command`.
            start_timeout_s: how long the server may take until it listens, in seconds.
            stop_timeout_s: how long it may take to end after SIGTERM, in seconds.
            checkout: a checkout of radixkv to run instead of the one that is imported here.
        """
        super().__init__(stop_timeout_s)
        self._command = list(command)
        self._checkout = checkout
        self._start_timeout_s = start_timeout_s
        self._stdout_thread: threading.Thread | None = None
        self._addresses: queue.Queue[str | None] = queue.Queue()  # None when stdout ends

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Id of the process, which must have been started."""
        assert self._process is not None, "the process was started"
        return self._process.pid

    @property
    def cpu_s(self) -> float | None:
        """CPU seconds that the process has used; None without /proc, or if there is no such process."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            # User and system time are fields 14 and 15 in proc(5). The fields after the name begin with field 3.
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            return None

    def stop(self) -> int | None:
        """As in `LoggedProcess`."""
        status = super().stop()
        if self._stdout_thread is not None:
            self._stdout_thread.join()
        if self._process is not None:
            assert self._process.stdout is not None
            self._process.stdout.close()
        return status

    def _start(self) -> str:
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                start_new_session=True,
                cwd=self._checkout,
                env=None if self._checkout is None else {**os.environ, "PYTHONPATH": str(self._checkout)},
            )
        except OSError as error:
            raise ConfigError(f"server: expected to start {self._command[0]}, got: {error.strerror}") from error
        self._stdout_thread = threading.Thread(target=self._read_stdout, name="server-stdout", daemon=True)
        self._stdout_thread.start()
        try:
            address = self._addresses.get(timeout=self._start_timeout_s)
        except queue.Empty:
            raise ConfigError(self._describe_failure(f"nothing within {self._start_timeout_s:.3g} s")) from None
        if address is None:
            status = self._process.wait()
            raise ConfigError(self._describe_failure(f"its end, with exit status {status}"))
        return address

    def _read_stdout(self) -> None:
        # Reads to the end, so that the server never blocks on a full pipe.
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if match := _LISTENING.search(line):
                self._addresses.put(match[1])
        self._addresses.put(None)

    def _describe_failure(self, got: str) -> str:
        return f"server: expected `listening on HOST:PORT`, got {got}; its stderr:\n{end_of_log(self._log)}"
