import os
import subprocess
import sys

import pytest

from bench.hostile import priority

_SHOW = "import os; input(); print(os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0))"


def _shown(monkeypatch=None, error=None):
    """Return the scheduling class and the niceness of a process that yields."""
    if error is not None:
        monkeypatch.setattr(priority.os, "sched_setscheduler", error)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _SHOW], **pipes) as process:
        priority.yield_to_others(process.pid)
        shown, _ = process.communicate("\n")
    return [int(word) for word in shown.split()]


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="this system has no class for idle processes")
def test_a_process_that_yields_runs_only_where_others_do_not():
    assert _shown()[0] == os.SCHED_IDLE


def test_where_the_class_is_forbidden_it_has_the_lowest_priority(monkeypatch):
    def forbid(*_):
        raise PermissionError

    assert _shown(monkeypatch, forbid)[1] == 19
