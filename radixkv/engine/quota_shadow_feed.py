"""Passes requests to the shadows that estimate what twice a tenant's ceiling would have saved."""

from __future__ import annotations

from radixkv.engine.observer import Observer
from radixkv.scheduling.request import Outcome, Request
from radixkv.statements.quota_shadow import QuotaShadows, ShadowRequest


class QuotaShadowFeed(Observer):
    """Passes each request that had its first token to the shadows of its tenant, if there are any.

    Args:
        shadows: the shadows.
    """

    def __init__(self, shadows: QuotaShadows) -> None:
        self._shadows = shadows

    def request_ended(self, request: Request, outcome: Outcome, error: Exception | None, now_s: float) -> None:
        """Queue a request."""
        if request.times.prefilled_s is None or not self._shadows.has(request.tenant):
            return
        params, generation = request.params, request.generation
        writes_all = generation is None or generation.sampling.write_generated
        num_written_tokens = request.num_tokens if writes_all else request.num_prompt_tokens
        self._shadows.put(
            request.tenant,
            ShadowRequest(
                seed=request.namespace.seed,
                tokens=request.tokens if writes_all else request.prompt_tokens,
                num_read_tokens=request.num_prompt_tokens if params.read_cache else 0,
                num_written_tokens=num_written_tokens if params.write_cache else 0,
            ),
        )
