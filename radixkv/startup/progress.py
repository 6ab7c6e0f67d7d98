"""Logs the progress of a start, so that a slow start can be distinguished from a stalled one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType

# A line is logged at least this often, unless a library holds the GIL while it is loaded: importing PyTorch held it for
# up to 0.9 s at a time. The interval is below 5 s so that lines are at most 5 s apart on a busy machine too.
REMINDER_S = 4.0

_log = logging.getLogger(__name__)


class StartProgress:
    """The progress of a start as a sequence of phases, each of which is logged when it begins.

    As a context manager it also runs a thread that logs reminders: which phase is still running, for how long, and the
    last detail that was reported. The thread ends at `ready` or at the end of the `with` block.

        with StartProgress() as progress:
            progress.begin("loading the model")          loading the model
            progress.report("layer 3 of 30")
                                                         still loading the model after 4 s: layer 3 of 30
            progress.ready()                             ready after 6.5 s

    Args:
        reminder_s: seconds after the last phase or reminder at which the current phase is logged again.
        now: returns the seconds of a monotonic clock.
    """

    def __init__(self, reminder_s: float = REMINDER_S, now: Callable[[], float] = time.monotonic) -> None:
        self._reminder_s = reminder_s
        self._now = now
        self._start_s = self._phase_start_s = self._last_log_s = now()
        self._phase = "starting"
        self._detail = ""
        self._facts: list[str] = []
        self._lock = threading.Lock()
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> StartProgress:
        """Start the thread that logs reminders."""
        self._thread = threading.Thread(target=self._keep_reminding, name="start-progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread, unless `ready` has ended it."""
        self._end()

    def begin(self, phase: str) -> None:
        """End the previous phase, begin the next one, and log its name.

        Args:
            phase: name of the phase, such as `loading the model`.
        """
        with self._lock:
            self._phase = phase
            self._detail = ""
            self._phase_start_s = self._last_log_s = self._now()
        _log.info("%s", phase)

    def report(self, detail: str) -> None:
        """Keep a detail of the current phase for the next reminder. This is cheap: it logs nothing.

        Args:
            detail: how far the phase has come, such as `layer 3 of 30`.
        """
        self._detail = detail

    def note(self, fact: str) -> None:
        """Add a fact about the server, such as `native attention`, to the line that `ready` logs."""
        self._facts.append(fact)

    def remind(self) -> float:
        """Log a reminder of the current phase if the last line is at least `reminder_s` old.

        Returns:
            Seconds until the next reminder is due.
        """
        with self._lock:
            now_s = self._now()
            due_in_s = self._last_log_s + self._reminder_s - now_s
            if due_in_s > 0:
                return due_in_s
            self._last_log_s = now_s
            elapsed_s = now_s - self._phase_start_s
            detail = f": {self._detail}" if self._detail else ""
            _log.info("still %s after %.0f s%s", self._phase, elapsed_s, detail)
        return self._reminder_s

    def ready(self) -> None:
        """End the start and its reminders. Log how long it took, and the facts that were noted."""
        self._end()
        facts = f": {', '.join(self._facts)}" if self._facts else ""
        _log.info("ready after %.1f s%s", self._now() - self._start_s, facts)

    def _keep_reminding(self) -> None:
        while not self._has_ended.wait(self.remind()):
            pass

    def _end(self) -> None:
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
