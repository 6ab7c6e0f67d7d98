"""Starts a fleet on Ray for one demo or benchmark, and stops it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import TracebackType

import grpc

from bench.fleet.processes import listener_of
from bench.parts.peers.process_tree import descendants, kill
from bench.parts.server_process import ServerProcess
from radixkv.service.client import Client

_TIMEOUT_S = 60.0
_ANY_PROMPT = [1]


class FleetProcess:
    """`radixkv fleet` of the embedded model as a context manager. All its processes end with the `with` statement.

    Args:
        replicas: number of replicas.
        settings: settings of the fleet, as `section.key=value`.

    Attributes:
        address: address of the ingress, inside the `with` statement.
    """

    def __init__(self, replicas: int, settings: Sequence[str] = ()) -> None:
        command = [sys.executable, "-m", "radixkv.service", "fleet", "--replicas", str(replicas), "--port", "0"]
        for setting in settings:
            command += ["--set", setting]
        self.address = ""
        self._process = ServerProcess(command, stop_timeout_s=_TIMEOUT_S)

    def __enter__(self) -> FleetProcess:
        """Start the fleet and wait until it listens.

        Raises:
            ConfigError: the fleet did not start.
        """
        self.address = self._process.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pids = self._pids()
        self._process.__exit__(kind, error, traceback)
        kill(pids)  # those that have not ended with the command

    def replicas(self) -> list[str]:
        """Return the addresses of the replicas that answer."""
        return sorted(self._answering_replicas())

    def kill(self, address: str) -> None:
        """Kill a replica with SIGKILL, as the kernel does when memory runs out."""
        os.kill(listener_of(address, self._pids()), signal.SIGKILL)

    def _answering_replicas(self) -> Iterator[str]:
        """Route one prompt repeatedly, each time avoiding the replicas that earlier routes have named."""
        seen: list[str] = []
        with Client(self.address, timeout_s=_TIMEOUT_S) as client:
            while True:
                try:
                    route = client.route(_ANY_PROMPT, avoid=seen)
                except grpc.RpcError:
                    return
                seen.append(route.address)
                yield route.address
                if route.num_replicas == 1:
                    return

    def _pids(self) -> set[int]:
        return descendants(self._process.pid)
