"""Makes answers: usage, timing, retention and held leases of computed requests, and what a probe finds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from radixkv.api.result import (
    FinishReason,
    GenerateResult,
    HeldLease,
    PrefillResult,
    ProbeResult,
    Retained,
    Timing,
    TokenLogprobs,
)
from radixkv.api.retention import DEFAULT_PRIORITY, Grant, Retention
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.prompt_lease import PromptLease
from radixkv.engine.offload.offload import Offload
from radixkv.engine.sampler import Prediction
from radixkv.namespace import Namespace, PromptKey
from radixkv.scheduling.held_leases import HeldLeases
from radixkv.scheduling.request import Request
from radixkv.tokens import TOKEN_BYTES


class Answers:
    """Turns requests and probes into results.

    Args:
        cache: grants retention.
        held_leases: takes the leases that outlive their request.
        offload: knows what is stored below the device; None if nothing is.
    """

    def __init__(self, cache: PrefixCache, held_leases: HeldLeases, offload: Offload | None = None) -> None:
        self._cache = cache
        self._held_leases = held_leases
        self._offload = offload

    def probe(self, namespace: Namespace, tokens: bytes, former: Sequence[PromptKey]) -> ProbeResult:
        """Say what a prefill of a prompt would reuse now. Changes nothing."""
        cached_tokens = self._cache.match(namespace, tokens).cached_tokens
        miss_reason = self._cache.explain(namespace, tokens, cached_tokens, former)
        offload = self._offload
        stored_tokens = 0 if offload is None else offload.stored_tokens(namespace, tokens, cached_tokens)
        return ProbeResult(cached_tokens, len(tokens) // TOKEN_BYTES, miss_reason, stored_tokens)

    def prefill(self, request: Request, lease: PromptLease, prediction: Prediction, now_s: float) -> PrefillResult:
        """Answer a prefill. If its caller asked to hold the lease, `held_leases` owns it afterwards.

        None is held of a prompt that was purged.
        """
        is_purged = request.is_revoked or lease.is_revoked  # of an invoked adapter perhaps the request alone
        is_held = request.params.hold_lease and not is_purged
        logprobs = prediction.logprobs
        return PrefillResult(
            request_id=request.params.request_id,
            usage=request.usage,
            next_token_id=prediction.next_token_id,
            top_logprobs=logprobs[0].top if logprobs else (),
            logits=prediction.logits,
            miss_reason=request.miss_reason,
            timing=_timing(request, now_s),
            retained=self._retain(request, lease, now_s),
            held_lease=self._hold(request, lease, now_s) if is_held else None,
        )

    def generation(
        self, request: Request, finish_reason: FinishReason, logprobs: Sequence[TokenLogprobs], now_s: float
    ) -> GenerateResult:
        """Answer a generation, which may be paused. `logprobs` are those of its tokens that were not told."""
        assert request.generation is not None, "only a generation has a finish reason"
        return GenerateResult(
            request_id=request.params.request_id,
            usage=request.usage,
            token_ids=tuple(request.generation.token_ids),
            logprobs=logprobs,
            prompt_logprobs=request.generation.prompt_logprobs or (),
            finish_reason=finish_reason,
            miss_reason=request.miss_reason,
            timing=_timing(request, now_s),
            retained=self._retain(request, request.lease, now_s),
        )

    def retain(self, namespace: Namespace, tokens: bytes, retention: Retention, now_s: float) -> Retained:
        """Set the priority of what is cached and stored of a range, whatever it was before."""
        grant = self._cache.retain(namespace, tokens, retention)
        if self._offload is not None:
            grant = self._offload.retain(namespace, tokens, retention, grant)
        return _retained(grant, now_s)

    def renew(self, lease_id: str, tenant: str, now_s: float) -> float:
        """Let a held lease live on; see `HeldLeases.renew`. Returns when it expires, in Unix time."""
        return time.time() + self._held_leases.renew(lease_id, tenant, now_s) - now_s

    def _retain(self, request: Request, lease: PromptLease | None, now_s: float) -> Retained | None:
        """Retain the range that the request asks for.

        A priority below the default holds for tokens that this request published. Those of others keep theirs. Without
        a lease nobody knows which these are, and none gets a lower one.
        """
        retention = request.params.retention
        if retention is None:
            return None
        start, end = retention.range_in(request.num_prompt_tokens)
        shared_upto = start
        if retention.priority < DEFAULT_PRIORITY:
            written_from = end
            if lease is not None and lease.written_from_tokens is not None:
                written_from = lease.written_from_tokens
            block_size = self._cache.block_size
            shared_upto = max(start, min(end, -(-written_from // block_size) * block_size))
        grant = Grant(0, 0, 0)
        for part_start, part_end, only_raise in (
            (start, shared_upto, True),
            (shared_upto, end, retention.priority >= DEFAULT_PRIORITY),
        ):
            if part_start < part_end:
                part = dataclasses.replace(retention, start=part_start, end=part_end)
                grant = grant.joined(
                    self._cache.retain(request.namespace, request.prompt_tokens, part, only_raise=only_raise)
                )
        return _retained(grant, now_s)

    def _hold(self, request: Request, lease: PromptLease, now_s: float) -> HeldLease:
        block_ids = lease.block_ids
        lease_id, expires_s = self._held_leases.hold(lease, request.tenant, now_s)
        request.lease = None  # `held_leases` owns it
        return HeldLease(lease_id, time.time() + expires_s - now_s, block_ids)


def _retained(grant: Grant, now_s: float) -> Retained:
    """Return a grant with its end in Unix time."""
    ends_s = grant.expires_s
    return Retained(grant, None if ends_s is None else time.time() + ends_s - now_s)


def _timing(request: Request, now_s: float) -> Timing:
    assert request.scheduled_s is not None, "an answer comes after admission"
    assert request.prefilled_s is not None, "an answer comes after the first token"
    return Timing(
        queue_us=_microseconds(request.scheduled_s - request.received_s),
        prefill_us=_microseconds(request.prefilled_s - request.scheduled_s),
        decode_us=0 if request.generation is None else _microseconds(now_s - request.prefilled_s),
        total_us=_microseconds(now_s - request.received_s),
    )


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
