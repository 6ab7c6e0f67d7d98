"""The state of a replica that a router considers when it routes a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Hits(NamedTuple):
    """Prompt tokens that a replica need not compute, by tier.

    Attributes:
        device: tokens that are cached on its device, or were recently sent there.
        host: tokens in its host memory.
        disk: tokens on its disk.
        remote: tokens in the shared store.
    """

    device: int = 0
    host: int = 0
    disk: int = 0
    remote: int = 0

    @property
    def total(self) -> int:
        """Tokens of all tiers."""
        return self.device + self.host + self.disk + self.remote


NO_HITS = Hits()


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """The times per token on a replica, in seconds. For live servers, only `compute_s` is measured so far.

    Attributes:
        compute_s: time to compute a token.
        host_s: time to load its K/V from host memory.
        disk_s: time to load its K/V from the disk.
        remote_s: time to load its K/V from the shared store.
    """

    compute_s: float = 1e-4
    host_s: float = 2e-6
    disk_s: float = 1e-5
    remote_s: float = 2e-5

    def seconds(self, prompt_tokens: int, hits: Hits) -> float:
        """Return the time to compute and load the K/V of a prompt.

        Tokens in a tier that is slower than computing are computed instead of loaded.

        >>> TokenTimes(compute_s=1, host_s=0.5, disk_s=3).seconds(10, Hits(device=2, host=4, disk=1))
        6.0
        """
        device, host, disk, remote = hits
        if not (host or disk or remote):
            return (prompt_tokens - device) * self.compute_s
        loaded_s = (
            host * min(self.host_s, self.compute_s)
            + disk * min(self.disk_s, self.compute_s)
            + remote * min(self.remote_s, self.compute_s)
        )
        return (prompt_tokens - hits.total) * self.compute_s + loaded_s


DEFAULT_TIMES = TokenTimes()


class Candidate(NamedTuple):
    """A replica that may get a request. A tuple, because each decision creates one per replica.

    Attributes:
        name: name of the replica.
        hits: prompt tokens that the replica has cached.
        queue_tokens: tokens that the replica computes before this request.
        recent_tokens: tokens that the replica computed recently, with exponentially decaying weights.
        times: the times per token on the replica.
    """

    name: str
    hits: Hits = NO_HITS
    queue_tokens: float = 0.0
    recent_tokens: float = 0.0
    times: TokenTimes = DEFAULT_TIMES
