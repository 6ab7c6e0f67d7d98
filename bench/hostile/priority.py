"""The priority of attackers: they use only the CPU time that servers and well-behaved clients leave."""

from __future__ import annotations

import os


def yield_to_others(pid: int) -> None:
    """Give a process, and the threads that it starts later, only CPU time that no process of normal priority needs.

    Real attackers have their own machines. On one machine, an attacker of equal priority takes CPU time from the server
    and from the well-behaved client, and the resulting wait is no fault of the server.

    Args:
        pid: id of the process, before it has threads.
    """
    try:
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # the system has no such scheduling class, or forbids it
        os.setpriority(os.PRIO_PROCESS, pid, 19)
