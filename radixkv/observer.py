"""Who wants to know what the engine does: metrics and traces."""

from __future__ import annotations

from radixkv.request import Outcome, Request


class Observer:
    """Is told of what happens, on the engine's thread. Does nothing; subclasses do what they want to, quickly."""

    def step_done(self, seconds: float, num_requests: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """A step was computed. Prefill tokens are all but those of requests that decode."""

    def step_failed(self, seconds: float, num_requests: int) -> None:
        """A step raised."""

    def request_paused(self, request: Request) -> None:
        """A running request gave its blocks back, and waits for others."""

    def request_ended(self, request: Request, outcome: Outcome, error: Exception | None, now_s: float) -> None:
        """A request is over.

        Args:
            request: with its usage and its times.
            outcome: how it ended.
            error: why it failed, if it did.
            now_s: by the engine's clock, which `request.received_s` and the others are of.
        """
