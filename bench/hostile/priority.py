"""The priority of attackers: they take what servers and innocents leave of the processors."""

from __future__ import annotations

import os


def yield_to_others(pid: int) -> None:
    """Let a process, and threads that it starts from now on, run only where no process of usual priority wants to.

    Real attackers have machines of their own. On one machine an attacker of equal priority takes its turns at the
    processors from server and innocent, and a wait for that is no fault of the server.

    Args:
        pid: of the process, before it has threads.
    """
    try:
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # the system has no such class, or forbids it
        os.setpriority(os.PRIO_PROCESS, pid, 19)
