"""Starts a worker process, sends it tasks and stops it."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Self

from bench.parts.peers.process_tree import cpu_s, kill, read_processes, resident_bytes, tree_of
from bench.parts.peers.workers.task import Done, Ready, Task, from_line
from bench.parts.server_process import end_of_log

_TIMEOUT_S = 3600.0  # the slowest task took 5 minutes on one core
_STOP_TIMEOUT_S = 30.0


class WorkerFailed(Exception):
    """A worker crashed, refused a task or returned an unexpected answer. The message has the reason."""


@dataclass(frozen=True, slots=True)
class PeerMeasurement:
    """The answers to a task, and the CPU seconds that the worker and all its processes used for it."""

    done: Done
    cpu_s: float


class WorkerProcess:
    """A worker subprocess as a context manager, which stops it at the end, with all processes that it started.

    It has its own session, so Ctrl-C at the terminal reaches only the benchmark.

    Args:
        name: names the worker in messages.
        command, environment: how it is started.
        timeout_s: a worker that prints no line for longer is killed.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], timeout_s: float = _TIMEOUT_S
    ) -> None:
        self.name = name
        self._command = list(command)
        self._environment = dict(environment)
        self._timeout_s = timeout_s
        self._has_timed_out = False
        self._stderr: IO[bytes] | None = None
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._stderr = tempfile.TemporaryFile()  # closed in stop(); a pipe could block when it is full
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=self._environment,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def cpu_s(self) -> float:
        """CPU seconds that the running worker and all its processes have used so far."""
        assert self._process is not None
        return cpu_s(self._process.pid)

    @property
    def resident_bytes(self) -> int:
        """The resident memory of the processes that the running worker has started, such as a server."""
        assert self._process is not None
        return resident_bytes(tree_of(self._process.pid, read_processes()) - {self._process.pid})

    def wait_until_ready(self) -> Ready:
        """Read the first line.

        Raises:
            WorkerFailed: the worker ended, printed another line, or none in time.
        """
        ready = self._read_line()
        if not isinstance(ready, Ready):
            raise WorkerFailed(f"{self.name}: expected a line with ready, got {ready}")
        return ready

    def run(self, task: Task) -> PeerMeasurement:
        """Send a task and wait for its answers.

        Raises:
            WorkerFailed: the worker crashed, failed at the task, took too long, or returned a wrong number of tokens.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        cpu_before_s = cpu_s(self._process.pid)
        try:
            self._process.stdin.write(task.to_line())
            self._process.stdin.flush()
        except OSError:
            pass  # the worker has ended, which is reported below, with its stderr
        done = self._read_line()
        if not isinstance(done, Done):
            raise WorkerFailed(f"{self.name}: {done}")
        if [len(ids) for ids in done.token_ids] != [task.new_tokens] * len(task.prompts):
            raise WorkerFailed(f"{self.name}: the number of tokens of a prompt is not {task.new_tokens}")
        return PeerMeasurement(done, cpu_s(self._process.pid) - cpu_before_s)

    def stop(self) -> None:
        """Stop the worker: close its stdin, wait, and kill it after a timeout. Calling it again does nothing."""
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            tree = tree_of(process.pid, read_processes())
            try:
                with contextlib.suppress(OSError):  # the worker ended without reading a task
                    process.stdin.close()  # the worker's loop ends with its stdin
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_TIMEOUT_S)
            finally:  # also on a second Ctrl-C
                kill(tree)  # the processes that still run
                process.wait()
                process.stdout.close()
        if self._stderr is not None:
            self._stderr.close()

    def _read_line(self) -> Ready | Done | str:
        assert self._process is not None
        assert self._process.stdout is not None
        timer = threading.Timer(self._timeout_s, self._kill_after_timeout)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            status = self._process.wait()
            if self._has_timed_out:
                raise WorkerFailed(f"{self.name}: expected a line within {self._timeout_s:g} s, got none")
            assert self._stderr is not None
            raise WorkerFailed(
                f"{self.name}: ended with exit status {status}; its stderr ends with:\n{end_of_log(self._stderr)}"
            )
        try:
            return from_line(line)
        except ValueError as error:
            raise WorkerFailed(f"{self.name}: {error}") from None

    def _kill_after_timeout(self) -> None:
        assert self._process is not None
        self._has_timed_out = True
        kill(tree_of(self._process.pid, read_processes()))
