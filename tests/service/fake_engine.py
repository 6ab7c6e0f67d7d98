"""An engine without a model or torch: answers are computed from the token ids. Each generation has a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from concurrent.futures import Future

import numpy as np

from radixkv.api.awaits import Awaits
from radixkv.api.caller import Caller
from radixkv.api.explanation import LookUp
from radixkv.api.hints import AgentStats
from radixkv.api.limits import Limits
from radixkv.api.miss_reason import MissReason
from radixkv.api.result import (
    FinishReason,
    GeneratedTokens,
    GenerateResult,
    GenerationFuture,
    HeldLease,
    PrefillResult,
    ProbeResult,
    Retained,
    Timing,
    TokenLogprobs,
    Usage,
)
from radixkv.api.retention import Grant
from radixkv.api.segments import StoredPage
from radixkv.api.stats import (
    BlockStats,
    EngineLoad,
    EngineStats,
    PartStats,
    RequestStats,
    SessionStats,
    StateStats,
    TenantStats,
    TimeStats,
    TokenStats,
)
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.purge import Purged, all_slices
from radixkv.cache.segment_source import SegmentSource
from radixkv.compute.device_stats import DeviceStats
from radixkv.engine.adapters.adapters import Adapters
from radixkv.engine.hints import HintApplier
from radixkv.engine.inbox import EngineThread
from radixkv.engine.public_prefixes import PublicPrefixRegistry
from radixkv.errors import Draining, InvalidRequest, RadixKVError, UnknownLease
from radixkv.namespace import Namespace, PromptKey
from radixkv.offload.index.tier_index import TierIndex
from radixkv.scheduling.request import Request
from tests.adapter_doubles import FakeDevice

VOCAB_SIZE = 256
FAKE = Namespace("fake")
LIMITS = Limits(
    model="fake",
    device="cpu",
    vocab_size=VOCAB_SIZE,
    max_prompt_tokens=2_000_000,
    max_sequence_tokens=2_000_000,
    block_size=16,
    epoch=2**53 + 1,
    ceiling_tokens={"bounded": 32},
    default_ceiling_tokens=None,
    pool_tokens=4096,
    model_fingerprint="fake fingerprint",
)
TENANTS = (
    TenantStats("a", 3, 2, 1, 4, 60, 40, 2, 0, None, {"disk": 7}),
    TenantStats("b", 0, 0, 0, 0, 0, 0, 0, 5, 9, {}),
)


class FakeEngine:
    """Answers at once, unless `is_gated`: then requests run until `open_gate` or until they are cancelled.

    Attributes:
        params: all PrefillParams that were received, in order.
        futures: all futures returned by `prefill` and `generate`, in order.
        cache: what `segments` lists; requests do not change it.
        stored: the index of the store `host`, from which `segments` lists its blocks.
        samplings: the Sampling of every call of `generate`, in order.
        retentions, hints, purges: the arguments of every call of `retain`, `hint` and `purge`, in order.
        loads: the prompts that hints have loaded, with the names of their sessions.
        refusal: raised at once by `prefill`, `generate` and `look_up`; None to accept calls.
        failure: set on the futures of `prefill` and `generate` instead of a result; None for no failure.
    """

    def __init__(
        self,
        *,
        is_gated: bool = False,
        num_logits: int = VOCAB_SIZE,
        num_blocks: int = 64,
    ) -> None:
        self.limits = LIMITS
        self.events = None
        self.cache = PrefixCache(num_blocks, block_size=4)
        self.token_s = None
        self.stored = TierIndex("host", 100)
        self.segments = SegmentSource(self.cache, self._call, self._stored_page)
        self.device = FakeDevice()
        thread = EngineThread(self._call, lambda function: function(), lambda: self.cancellation)
        self.offload = self.transfer = None
        self.statements = None
        self.misses = None
        self.adapters = Adapters("fake", self.device.source(), self.cache, thread)
        self.public = PublicPrefixRegistry(self.cache.public, LIMITS, self.adapters, thread, self._compute_public)
        self.eos_token_ids = frozenset({2, 3})
        self.num_logits = num_logits
        self.is_healthy = self.is_alive = self.can_recover = True
        self.is_gated = is_gated
        self.is_hanging = False  # while it is true, `load` and calls through `_call` are never answered
        self.is_started = self.is_stopped = self.is_draining = False
        self.params = []
        self.futures = []
        self.samplings = []
        self.cancellation = Draining("engine: stopped before the answer was known")
        self.retentions = []
        self.hints = []
        self.loads = []
        self._hint_applier = HintApplier(self.cache, self.cache.retain, self._load_ahead)
        self.purges = []
        self.refusal: Exception | None = None
        self.failure: BaseException | None = None
        self._running: list[tuple[Future, object]] = []
        self._prompts: dict[Caller, list[bytes]] = {}
        self._leases: dict[str, str] = {}
        self._changed = threading.Condition()

    def _stored_page(self, store: str, start: int, tenant: str | None, max_listed: int) -> StoredPage:
        if store != "host":
            raise InvalidRequest(f"store: expected one of host, got {store!r}")
        return self.stored.page(start, tenant, max_listed)

    def _compute_public(self, request: Request) -> None:
        with self.cache.lease(request.namespace, request.params.tokens) as lease:
            lease.commit(lease.num_tokens)
        self.adapters.release(request.namespace.adapter)
        request.future.set_result(None)

    def prefill(self, params) -> Future:
        if self.is_draining:
            raise Draining("service: shutting down")
        if self.refusal is not None:
            raise self.refusal
        future = Future()
        self.params.append(params)
        self.futures.append(future)
        if self.is_gated:
            with self._changed:
                self._running.append((future, params))
            future.add_done_callback(self._forget)
        else:
            self._answer(future, params)
        return future

    def generate(self, params, sampling, on_tokens, fetched=None) -> Future:
        """Pass every token but the last to `on_tokens`, on a separate thread. The result waits for the gate to open."""
        if self.is_draining:
            raise Draining("service: shutting down")
        if self.refusal is not None:
            raise self.refusal
        sampling.validate(VOCAB_SIZE)
        params.require_generable()
        future = GenerationFuture()
        self.params.append(params)
        self.samplings.append(sampling)
        self.futures.append(future)
        threading.Thread(target=self._generate, args=(future, params, sampling, on_tokens), daemon=True).start()
        return future

    def _generate(self, future, params, sampling, on_tokens) -> None:
        ids = np.frombuffer(params.tokens, dtype="<u4").tolist()
        generated, num_streamed = [], 0
        finish_requested = threading.Event()
        future.watch_finish(finish_requested.set)
        while len(generated) < sampling.max_new_tokens and not future.cancelled() and not finish_requested.is_set():
            generated.append(next_token_of(ids))
            ids.append(generated[-1])
            usage = Usage(len(ids) - len(generated), 0, len(ids) - len(generated), 0, len(generated))
            if generated[-1] in sampling.stop_token_ids:
                break
            if len(generated) < sampling.max_new_tokens:
                logprobs = _logprobs_of(generated[-1:], sampling)
                prompt_logprobs = _prompt_logprobs_of(ids, usage, sampling) if len(generated) == 1 else ()
                on_tokens(GeneratedTokens((generated[-1],), usage, logprobs, prompt_logprobs))
                num_streamed += 1

        while self.is_gated and not future.cancelled() and not finish_requested.is_set():
            time.sleep(0.001)

        if not future.set_running_or_notify_cancel():
            return
        if self.failure is not None:
            future.set_exception(self.failure)
            return
        has_stopped = finish_requested.is_set() or generated[-1] in sampling.stop_token_ids
        reason = FinishReason.STOP if has_stopped else FinishReason.LENGTH
        retained = None if params.retention is None else _retained(params.retention)
        future.set_result(
            GenerateResult(
                params.request_id,
                usage,
                tuple(generated),
                reason,
                MissReason.COLD,
                Timing(1, 2, 3, 6),
                retained,
                _logprobs_of(generated[num_streamed:], sampling),
                _prompt_logprobs_of(ids, usage, sampling),
            )
        )

    def probe(self, tokens, caller) -> Future:
        future = Future()
        num_tokens = len(tokens) // 4
        cached = self._cached_tokens(tokens, caller)
        future.set_result(ProbeResult(cached, num_tokens, _miss_reason(cached, num_tokens)))
        return future

    def look_up(self, tokens: bytes, caller: Caller) -> Future:
        """Look a prompt up in `cache`, which requests do not change."""
        if self.refusal is not None:
            raise self.refusal
        namespace = FAKE._replace(tenant=caller.tenant, adapter=caller.adapter, salt=caller.salt)
        cached = self.cache.match(namespace, tokens).cached_tokens
        reason = self.cache.explain(namespace, tokens, cached)
        return self._call(
            lambda: LookUp(tokens, cached, reason, self.cache.divergence(namespace, tokens), self.token_s)
        )

    def release(self, lease_id, caller) -> Future:
        future = Future()
        if self._leases.get(lease_id) == caller.tenant:
            del self._leases[lease_id]
            future.set_result(None)
        else:
            future.set_exception(UnknownLease(f"lease_id: expected a held lease of this tenant, got {lease_id!r}"))
        return future

    def renew(self, lease_id, caller) -> Future:
        future = Future()
        if self._leases.get(lease_id) == caller.tenant:
            future.set_result(1_800_000_000.0)
        else:
            future.set_exception(UnknownLease("lease_id: expected a held lease of this tenant, got another"))
        return future

    def retain(self, tokens, retention, caller) -> Future:
        future = Future()
        self.retentions.append((tokens, retention, caller))
        future.set_result(_retained(retention))
        return future

    def hint(self, actions, caller, tokens=b"") -> Future:
        self.hints.append(([each.action_type for each in actions], caller, tokens))
        key = PromptKey(Namespace("fake", caller.tenant, caller.adapter, caller.salt), tokens) if tokens else None
        digest_of = self.adapters.digest_of
        return self._call(lambda: self._hint_applier.apply_in_slices(actions, caller.tenant, key, digest_of))

    def _load_ahead(self, namespace: Namespace, tokens: bytes, session_id: str) -> int:
        self.loads.append((tokens, session_id))
        return len(tokens) // 4

    def end_session(self, session_id, caller=None) -> Future:
        future = Future()
        future.set_result(7 if session_id == "build-42" else None)
        return future

    def purge(self, *, tenant, adapter, salt) -> Future:
        future = Future()
        self.purges.append((tenant, adapter, salt))
        future.set_result(Purged(7, 2))
        return future

    def load(self) -> Future:
        future = Future()
        if not self.is_hanging:
            future.set_result(self._engine_load())
        return future

    def _call(self, function, tenant=None) -> Future:
        future = Future()
        if self.is_hanging:
            return future
        try:
            result = function()
            future.set_result(all_slices(result) if isinstance(result, Generator) else result)
        except RadixKVError as error:
            future.set_exception(error)
        return future

    def statement_days(self, tenant=None) -> Future:
        return self._call(lambda: self.statements.days_in_memory(tenant))

    def sessions(self, max_sessions, tenant=None) -> Future:
        future = Future()
        sessions = [
            SessionStats("acme", "build-42", Awaits.TOOL, 7, 1, 12.0),
            SessionStats("", "chat", Awaits.USER, 3, 0, 99.0),
        ]
        future.set_result([each for each in sessions if tenant in (None, each.tenant)][:max_sessions])
        return future

    def stats(self, max_tenants=100, tenant=None) -> Future:
        future = Future()
        stats = EngineStats(
            load=self._engine_load(),
            uptime_s=1.5,
            tokens=TokenStats(prompt=100, cached=60, computed=40, written=30, generated=20, recomputed=10),
            segments=11,
            block_bytes=4096,
            kv_dtype="int8",
            tenants=tuple(each for each in TENANTS if tenant in (None, each.tenant))[:max_tenants],
            known_tenants=1234,
            first_tokens=TimeStats((0.1, 0.2), (3, 1, 0), 0.4),
        )
        future.set_result(stats)
        return future

    def agent_stats(self) -> AgentStats:
        return AgentStats(len(self.cache.sessions), {("kv.pin", "clipped"): 2}, 640, 1)

    def device_stats(self) -> DeviceStats:
        return DeviceStats(
            "warp-specialized attention", captured_steps=30, dropped_steps=2, used_bytes=3, total_bytes=8
        )

    def _engine_load(self) -> EngineLoad:
        return EngineLoad(
            blocks=BlockStats(
                total=10, free=5, leased=2, published=3, pinned=1, retained=2, retainable=4, on_probation=3
            ),
            requests=RequestStats(
                waiting=0,
                running=len(self._running),
                following=6,
                paused=1,
                finished=7,
                failed=8,
                cancelled=9,
                pauses=2,
            ),
            namespaces=len(self._prompts),
            held_leases=len(self._leases),
            evicted_blocks=2**53 + 1,
            evicted_probation_blocks=2**53,
            states=StateStats(snapshots=3, max_snapshots=4, given_up_snapshots=5, recomputed_tokens=6),
            parts=PartStats(free=7, needed=8, kept=9, given_up=10, shortened_hits=11, lost_tokens=12),
        )

    def start(self) -> None:
        self.is_started = True

    def drain(self, timeout_s: float) -> bool:
        self.is_draining = True
        with self._changed:
            is_done = self._changed.wait_for(lambda: not self._running, timeout_s)
            unfinished = list(self._running)
        for future, _ in unfinished:
            future.cancel()
        return is_done

    def stop(self) -> None:
        self.is_stopped = True

    def open_gate(self) -> None:
        """Answer running requests, and answer later requests at once."""
        self.is_gated = False
        with self._changed:
            running = list(self._running)
        for future, params in running:
            self._answer(future, params)

    def _forget(self, finished: Future) -> None:
        with self._changed:
            self._running = [(future, params) for future, params in self._running if future is not finished]
            self._changed.notify_all()

    def _answer(self, future: Future, params) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if self.failure is not None:
            future.set_exception(self.failure)
            return
        ids = np.frombuffer(params.tokens, dtype="<u4")
        if not ids.size or ids.max() >= VOCAB_SIZE:
            future.set_exception(InvalidRequest(f"token_ids: expected 1 or more ids below {VOCAB_SIZE}"))
            return
        caller = params.caller
        cached = self._cached_tokens(params.tokens, caller) if params.read_cache else 0
        logits = np.arange(self.num_logits, dtype=np.float32) / self.num_logits
        logits[next_token_of(ids)] = 1000.0
        held = None
        if params.hold_lease:
            block_table = np.arange(-(-ids.size // LIMITS.block_size), dtype=np.int32)
            held = HeldLease(f"lease-{len(self._leases)}", time.time() + 60, block_table)
            self._leases[held.lease_id] = caller.tenant
        if params.write_cache:
            self._prompts.setdefault(caller, []).append(params.tokens)
        future.set_result(
            PrefillResult(
                request_id=params.request_id,
                usage=Usage(ids.size, cached, ids.size - cached, (ids.size - cached) * params.write_cache),
                next_token_id=next_token_of(ids),
                top_logprobs=tuple((token, -float(token)) for token in range(params.top_logprobs)),
                logits=logits if params.return_logits else None,
                miss_reason=_miss_reason(cached, ids.size) if params.read_cache else MissReason.READ_DISABLED,
                timing=Timing(1, 2, 0, 3),
                held_lease=held,
                retained=None if params.retention is None else _retained(params.retention),
            )
        )

    def _cached_tokens(self, tokens: bytes, caller: Caller) -> int:
        """Count the tokens that a prompt shares with an earlier one of the caller, at most all tokens but the last."""
        ids = np.frombuffer(tokens, dtype="<u4")
        longest_prefix = 0
        for earlier_prompt in self._prompts.get(caller, ()):
            earlier_ids = np.frombuffer(earlier_prompt, dtype="<u4")
            size = min(ids.size, earlier_ids.size)
            is_equal = ids[:size] == earlier_ids[:size]
            longest_prefix = max(longest_prefix, size if is_equal.all() else int(np.argmin(is_equal)))
        return max(0, min(longest_prefix, ids.size - 1))


def next_token_of(ids) -> int:
    """Return the token after a prompt: the sum of its token ids, modulo the size of the vocabulary."""
    return int(np.sum(ids, dtype=np.int64)) % VOCAB_SIZE


def continuation(ids, count) -> list[int]:
    """Return the tokens that a generation of `count` tokens returns."""
    path = list(ids)
    for _ in range(count):
        path.append(next_token_of(path))
    return path[len(ids) :]


def _retained(retention) -> Retained:
    return Retained(Grant(3, 2, 1), None if retention.ttl_s is None else time.time() + retention.ttl_s)


def _miss_reason(cached: int, num_tokens: int) -> MissReason:
    if cached == num_tokens - 1:
        return MissReason.NONE
    return MissReason.DIVERGED if cached else MissReason.COLD


def _logprobs_of(token_ids, sampling) -> tuple[TokenLogprobs, ...]:
    """Return log probabilities that are the negated token ids, if they are requested."""
    if sampling.logprobs is None:
        return ()
    return tuple(TokenLogprobs(-float(each), ((each, -float(each)),) * sampling.logprobs) for each in token_ids)


def _prompt_logprobs_of(ids, usage, sampling) -> tuple[TokenLogprobs, ...]:
    """Return log probabilities that are the negated ids of all prompt tokens but the first, if they are requested."""
    if sampling.prompt_logprobs is None:
        return ()
    prompt_ids = ids[1 : usage.prompt_tokens]
    return tuple(TokenLogprobs(-float(each), ((each, -float(each)),) * sampling.prompt_logprobs) for each in prompt_ids)
