"""Runs an attacker in its own process, so that its CPU time and memory are not counted as the server's.

python -m bench.hostile.attacker NAME ADDRESS SECONDS SCALE HTTP_ADDRESS

The process prepares the attack, waits for a line on stdin, and attacks. After the preparation and after the attack, it
prints a line of JSON with what it observed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence

from bench.hostile.attacks.attack import Figures, Target
from bench.hostile.attacks.by_name import ATTACKS

_PREPARE_TIMEOUT_S = 300.0
_ATTACK_TIMEOUT_S = 120.0


class AttackerProcess:
    """An attacker in a subprocess, as an asynchronous context manager. The process ends with the `with` statement.

    Args:
        name: name of the attack.
        target: what it attacks.
        has_low_priority: whether it uses only CPU time that other processes leave.
    """

    def __init__(self, name: str, target: Target, *, has_low_priority: bool) -> None:
        self._has_low_priority = has_low_priority
        self._arguments = [name, target.address, str(target.seconds), str(target.scale), target.http_address]
        self._attack_timeout_s = target.seconds + _ATTACK_TIMEOUT_S
        self._process: asyncio.subprocess.Process

    async def __aenter__(self) -> AttackerProcess:
        """Start the process, which prepares the attack immediately."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "bench.hostile.attacker",
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        if self._has_low_priority:
            _yield_to_others(self._process.pid)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def wait_until_prepared(self) -> Figures:
        """Wait until the attack is prepared. Returns what the attacker observed."""
        return await self._read_figures(_PREPARE_TIMEOUT_S)

    async def attack(self) -> Figures:
        """Run the attack. Returns what the attacker observed."""
        assert self._process.stdin is not None, "the process was started with a pipe"
        self._process.stdin.write(b"\n")
        return await self._read_figures(self._attack_timeout_s)

    async def _read_figures(self, timeout_s: float) -> Figures:
        assert self._process.stdout is not None, "the process was started with a pipe"
        async with asyncio.timeout(timeout_s):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"attacker {self._arguments[0]}: expected a line, but it ended; its stderr has the reason"
            )
        figures: Figures = json.loads(line)
        return figures


def _yield_to_others(pid: int) -> None:
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Prepare an attack, and run it after a line on stdin."""
    name, address, seconds, scale, http_address = sys.argv[1:] if arguments is None else arguments
    target, attack = Target(address, float(seconds), float(scale), http_address), ATTACKS[name]
    prepared = asyncio.run(attack.prepare(target)) if attack.prepare else {}
    print(json.dumps(prepared), flush=True)
    sys.stdin.readline()
    print(json.dumps(asyncio.run(attack.run(target))), flush=True)


if __name__ == "__main__":
    main()
