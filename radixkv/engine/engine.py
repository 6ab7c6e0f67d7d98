"""The engine on a thread of its own. Only this thread changes the cache, the scheduler and the model."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from radixkv.api.caller import ANONYMOUS, Caller
from radixkv.api.explanation import LookUp
from radixkv.api.hints import AgentStats, HintAction, HintOutcome
from radixkv.api.limits import Limits
from radixkv.api.params import PrefillParams
from radixkv.api.result import GenerationFuture, OnTokens, PrefillResult, ProbeResult, Retained
from radixkv.api.retention import Retention
from radixkv.api.sampling import Sampling
from radixkv.api.statement import DayUse
from radixkv.api.stats import DEFAULT_MAX_TENANTS, EngineLoad, EngineStats, SessionStats
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.purge import Purged
from radixkv.cache.segment_source import SegmentSource
from radixkv.compute.device_stats import DeviceStats
from radixkv.compute.runner import Runner
from radixkv.config import EngineConfig
from radixkv.doctor.miss_profiler import Branches, MissProfiler
from radixkv.engine.adapters.adapters import Adapters, AdapterSource, KeyedPrompt
from radixkv.engine.admission_control import AdmissionControl
from radixkv.engine.core import EngineCore
from radixkv.engine.inbox import SERVICE_ORIGIN, CallerKind, CallOrigin, EngineThread, Inbox
from radixkv.engine.observer import Observer
from radixkv.engine.public_prefixes import PublicPrefixRegistry
from radixkv.engine.transfer.transfer import Transfer, TransferParts
from radixkv.engine.watchdog import Watchdog
from radixkv.errors import Draining, LifecycleError, RadixKVError, StepHangs
from radixkv.events.readers import EventSource
from radixkv.events.tree_feed import TreeFeed
from radixkv.offload.index.prompt_blocks import FetchedBlocks
from radixkv.offload.offload import CLOSE_LIMIT_S, Offload
from radixkv.offload.purge import PendingPurge, when_deleted
from radixkv.scheduling.rate_limiter import RateLimiter
from radixkv.scheduling.request import Generation, Request
from radixkv.statements.statement_book import StatementBook

# After this many failed steps in a row the engine is unhealthy, and periodically tries a step of one token.
_MAX_FAILED_STEPS = 3
_RETRY_PERIOD_S = 1.0
_STOP_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


# Opens the tiers of an engine. The argument wakes the engine's thread. Returns the tiers, and the parts that transfers
# of K/V between servers need (None without transfers).
OpenOffload = Callable[[Callable[[], None]], tuple[Offload, TransferParts | None]]


class Engine:
    """An `EngineCore` on a thread of its own.

    Any thread may call its methods. If a future is cancelled, its request ends and releases its blocks after the
    current step. Other methods than `prefill` and `generate` that return a future also raise QueueFull if too many
    calls wait, and Draining or StepHangs if the engine accepts no calls.

    Args:
        runner: model and K/V memory.
        cache: trees and block ids of the same memory.
        config: budgets and limits.
        weights: shares of each step by tenant; 1 for a tenant that is missing.
        observers: are notified of requests and steps, on the engine's thread.
        events: listens to the cache.
        rates: limits the rates of tenants; None for no limits.
        adapters: the device side of adapters; None without adapters.
        open_offload: connects the tiers below the device with the engine; None without tiers.
        statements: saves what the cache's ledger accounts; None without statements.
        misses: groups misses by cause; None without a profile of misses. The `MissFeed` that feeds it must be among
            `observers` and listen to the cache.

    Attributes:
        adapters, public: load and unload adapters, and register prefixes that all tenants share.
        limits: what the engine serves and accepts.
        eos_token_ids: the model's own tokens that end a generation.
        events: the log of what is cached; None without a listener.
        segments: lists what is cached, one page at a time.
        offload: the tiers below the device; None without tiers.
        transfer: the transfer of K/V between servers; None without one.
        statements, misses: as in the arguments.
    """

    def __init__(
        self,
        runner: Runner,
        cache: PrefixCache,
        config: EngineConfig,
        *,
        weights: dict[str, float] | None = None,
        observers: Iterable[Observer] = (),
        events: TreeFeed | None = None,
        rates: RateLimiter | None = None,
        adapters: AdapterSource | None = None,
        open_offload: OpenOffload | None = None,
        statements: StatementBook | None = None,
        misses: MissProfiler | None = None,
    ) -> None:
        model = runner.model
        self.limits = Limits.of_pool(
            model=model.name,
            device=str(model.device),
            vocab_size=model.vocab_size,
            max_model_tokens=model.max_tokens,
            num_blocks=cache.pool.num_blocks,
            block_size=cache.block_size,
            ceiling_blocks={tenant: usage.quota.ceiling_blocks for tenant, usage in cache.tenants.with_quota.items()},
            default_ceiling_blocks=cache.tenants.default_quota.ceiling_blocks,
            model_fingerprint=runner.fingerprint,
            compression_refusal=runner.compression_refusal,
            model_limit_reason=model.limit.explanation,
        )
        self.eos_token_ids = model.eos_token_ids
        self._runner = runner
        self._admission = AdmissionControl(config, rates)
        self._inbox = Inbox(config.max_waiting_calls, config.max_tenant_calls)
        offload, transfer_parts = (None, None) if open_offload is None else open_offload(self._inbox.wake)
        self._core = EngineCore.build(
            runner,
            cache,
            config,
            on_end=self._request_ended,
            on_start=self._admission.charge_prompt,
            observers=observers,
            weights=weights,
            has_pending_calls=lambda: not self._inbox.is_empty,
            events=events,
            offload=offload,
        )
        self.events = None if events is None else EventSource(events, cache.nodes, self._call)
        list_stored = None if offload is None else offload.stored
        self.segments = SegmentSource(cache, lambda function, tenant: self._call_for(tenant, function), list_stored)
        self.offload = offload
        self.statements = statements
        self.misses = misses
        engine_thread = EngineThread(self._call, self._inbox.put, lambda: self.cancellation)
        self.adapters = Adapters(runner.fingerprint, adapters, cache, engine_thread)
        self.transfer = None
        if transfer_parts is not None:
            self.transfer = Transfer(transfer_parts, self._core.held_leases, self.adapters, self._call_for)
        self.public = PublicPrefixRegistry(cache.public, self.limits, self.adapters, engine_thread, self._submit)
        self._watchdog = Watchdog(config.step_timeout_s, self._on_hang)
        self._thread = threading.Thread(target=self._loop, name="radixkv-engine", daemon=True)
        self._is_stopping = threading.Event()
        self._next_try_s = 0.0

    def device_stats(self) -> DeviceStats:
        """Return the attention kernels, CUDA graphs and memory of the device. May be called from any thread."""
        return self._runner.device_stats()

    def agent_stats(self) -> AgentStats:
        """Return the numbers of sessions, hints and prefetches. Any thread may call this."""
        return self._core.agent_stats()

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs. Once started, it ends only with `stop`, or because of a bug."""
        return self._thread.is_alive()

    @property
    def can_recover(self) -> bool:
        """Whether the engine serves or may serve again; if not, only a restart of the process helps.

        False after its thread has ended other than by `stop`, while a step or a call on that thread takes longer than
        `step_timeout_s`, and after all steps have failed for that long, although the engine tries one each second.
        """
        has_died = self._thread.ident is not None and not self._thread.is_alive() and not self._is_stopping.is_set()
        return not (has_died or self._watchdog.is_hanging or self._watchdog.keeps_failing)

    @property
    def is_healthy(self) -> bool:
        """Whether new requests are accepted, and steps neither hang nor fail repeatedly."""
        is_working = not self._watchdog.is_hanging and not self._is_failing
        return self._thread.is_alive() and not self._admission.is_closed and is_working

    @property
    def _is_failing(self) -> bool:
        """Whether steps fail repeatedly."""
        return self._core.num_failed_steps >= _MAX_FAILED_STEPS

    @property
    def cancellation(self) -> LifecycleError:
        """The error of futures that the engine cancelled: it has stopped, or a step hangs."""
        if self._admission.is_closed:
            return Draining("engine: stopped before the answer was known")
        return self._hang_error()

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()
        self._watchdog.start()
        if self.statements is not None:
            self.statements.start(self._call)
        if self.misses is not None:
            self.misses.start(self._branches_at)

    def prefill(self, params: PrefillParams) -> Future[PrefillResult]:
        """Queue a prefill.

        Raises:
            InvalidRequest, PromptTooLong, UnknownAdapter: the request is wrong.
            QueueFull: too many requests are unfinished, in total or of this tenant.
            RateExceeded: the tenant exceeds its rate of requests or tokens.
            BeyondCeiling: the request needs more blocks than its tenant may ever hold.
            Draining, StepHangs: the engine accepts no requests.
            Later, through the future: OutOfBlocks, OutOfMemory, QuotaExceeded, DeadlinePassed, StepFailed, Draining.
        """
        future: Future[PrefillResult] = Future()
        with self._acquired(params) as prompt:
            self.limits.require_prefill(params)
            self._submit(prompt.request(params, future))
        return future

    def generate(
        self, params: PrefillParams, sampling: Sampling, on_tokens: OnTokens, fetched: FetchedBlocks | None = None
    ) -> GenerationFuture:
        """Queue a prompt and the generation after it.

        Args:
            params: the prompt and its options.
            sampling: how tokens are sampled, and when to stop.
            on_tokens: called on the engine's thread with every new token except the last, which comes with the result.
                It must return quickly; if it raises, the request fails.
            fetched: blocks of the prompt from another server, if the engine has a `transfer`.

        Raises the same errors as `prefill`, at the same times, and SwitchedOff if the model does not support
        `sampling.compression`. The future may also raise the RequestError of a constraint.
        """
        future = GenerationFuture()
        with self._acquired(params) as prompt:
            self.limits.require_generation(params, sampling)
            generation = Generation.of(sampling, self.eos_token_ids, on_tokens)
            self._submit(prompt.request(sampling.prompt_params(params), future, generation, fetched))
        return future

    def probe(self, tokens: bytes, caller: Caller = ANONYMOUS) -> Future[ProbeResult]:
        """Return what a prefill would reuse now. Computes and changes nothing.

        Raises InvalidRequest, PromptTooLong or UnknownAdapter if the request is wrong.
        """
        prompt = self.adapters.keyed(caller, tokens)
        self.limits.require_tokens(tokens)
        return self._call_for(caller.tenant, lambda: self._core.probe(*prompt.key, prompt.former))

    def look_up(self, tokens: bytes, caller: Caller = ANONYMOUS) -> Future[LookUp]:
        """Return what `explain` of `radixkv.explain` needs of a prompt. Computes and changes nothing.

        Raises:
            InvalidRequest, PromptTooLong, UnknownAdapter: the request is wrong.
            RateExceeded: the tenant exceeds its rate of requests.
        """
        prompt = self.adapters.keyed(caller, tokens)
        self.limits.require_tokens(tokens)
        self._admission.charge_call(caller.tenant)
        return self._call_for(caller.tenant, lambda: self._core.look_up(*prompt.key, prompt.former))

    def release(self, lease_id: str, caller: Caller = ANONYMOUS) -> Future[None]:
        """Release a held lease. The future raises UnknownLease if the caller's tenant holds no such lease."""
        return self._call_for(caller.tenant, lambda: self._core.held_leases.release(lease_id, caller.tenant))

    def renew(self, lease_id: str, caller: Caller = ANONYMOUS) -> Future[float]:
        """Restart the time to live of a held lease. The future has its expiry in Unix time, or raises UnknownLease."""
        return self._call_for(caller.tenant, lambda: self._core.renew(lease_id, caller.tenant))

    def retain(self, tokens: bytes, retention: Retention, caller: Caller = ANONYMOUS) -> Future[Retained]:
        """Set the retention priority of a cached range; see `PrefixCache.retain`.

        Raises the same errors as `probe`.
        """
        prompt = self.adapters.keyed(caller, tokens)
        self.limits.require_retention(tokens, retention)
        return self._call_for(caller.tenant, lambda: self._core.retain(*prompt.key, retention))

    def hint(
        self, actions: Sequence[HintAction], caller: Caller = ANONYMOUS, tokens: bytes = b""
    ) -> Future[tuple[HintOutcome, ...]]:
        """Apply hints; see `HintApplier`. The future has one outcome for each action.

        Args:
            actions: at most `MAX_HINT_ACTIONS`.
            caller: the tenant, adapter and salt of the prompt.
            tokens: the prompt that the actions address; empty for none.

        Raises:
            InvalidRequest, PromptTooLong, UnknownAdapter: the call is wrong. What is wrong with an action is in its
                outcome.
            RateExceeded: the tenant exceeds its rate of requests.
        """
        prompt = None
        if tokens:
            prompt = self.adapters.keyed(caller, tokens).key
            self.limits.require_tokens(tokens)
        self._admission.charge_call(caller.tenant)
        digest_of = self.adapters.digest_of
        return self._call_for(
            caller.tenant, lambda: self._core.hints.apply_in_slices(actions, caller.tenant, prompt, digest_of)
        )

    def end_session(self, session_id: str, caller: Caller = ANONYMOUS) -> Future[int | None]:
        """End a session of the caller's tenant; see `PrefixCache.end_session`."""
        return self._call_for(caller.tenant, lambda: self._core.cache.end_session(caller.tenant, session_id))

    def purge(
        self, *, tenant: str | None = None, adapter: str | None = None, salt: str | None = None
    ) -> Future[Purged]:
        """Purge the namespaces with these names (None: any) on the device and in all tiers.

        Also forgets the causes of all misses of the tenant, or of all tenants. Raises UnknownAdapter.
        """
        digest = None if adapter is None else self.adapters.digest_of(adapter)

        def purge_in_slices() -> Generator[None, None, PendingPurge]:
            purge = yield from self._core.purge_in_slices(tenant=tenant, adapter=digest, salt=salt)
            if self.misses is not None:
                self.misses.forget(tenant)
            return purge

        return when_deleted(self._call_for(tenant, purge_in_slices))

    def stats(self, max_tenants: int = DEFAULT_MAX_TENANTS, tenant: str | None = None) -> Future[EngineStats]:
        """Return all statistics, including those of the largest tenants, or of `tenant`; see `StatsCollector.stats`."""
        return self._call_for(tenant, lambda: self._core.stats.stats(max_tenants, tenant))

    def statement_days(self, tenant: str | None = None) -> Future[dict[int, DayUse]]:
        """Return the use of one tenant, or of all (None), on the days in memory; for `StatementBook.statement`."""
        statements = self.statements
        assert statements is not None, "there are statements"
        return self._call_for(tenant, lambda: statements.days_in_memory(tenant))

    def _branches_at(self, segment_numbers: Sequence[int], tenant: str, session_id: str) -> Future[Branches]:
        return self._call(lambda: self._core.branches_at(segment_numbers, tenant, session_id))

    def sessions(self, max_sessions: int, tenant: str | None = None) -> Future[list[SessionStats]]:
        """Return the sessions that were used most recently; see `StatsCollector.sessions`."""
        return self._call_for(tenant, lambda: self._core.stats.sessions(max_sessions, tenant))

    def load(self) -> Future[EngineLoad]:
        """Return the load of the engine; cheaper than `stats`."""
        return self._call(self._core.stats.load)

    def check(self) -> Future[None]:
        """Check every invariant of the cache. The future raises InvariantViolation if one does not hold."""
        return self._call(self._core.cache.check)

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, and cancel those that do not end in `timeout_s` seconds. Returns whether all ended."""
        self._admission.close()
        is_done = self._admission.wait_until_done(timeout_s)
        self._admission.cancel_all()
        return is_done and not self._watchdog.is_hanging

    def stop(self) -> None:
        """Cancel all requests and end the thread. If a step does not end, the thread keeps running.

        An engine that was not started closes its tiers and its statements, and cannot be started any more.
        """
        self.adapters.close()
        self.drain(0)
        if self._thread.ident is None:
            self._inbox.close()
            self._core.close(Draining("engine: stopped"))
        else:
            self._inbox.put(self._is_stopping.set)
            self._thread.join(_STOP_TIMEOUT_S + (0 if self.offload is None else CLOSE_LIMIT_S))
            if self._thread.is_alive():
                _log.error("a step does not end; the engine's thread is left running")
            self._watchdog.stop()
        if self.statements is not None:
            self.statements.close(has_engine_ended=not self._thread.is_alive())
        if self.misses is not None:
            self.misses.close()

    def _on_hang(self) -> None:
        """Cancel all requests and calls. The step may still write to its blocks, so these are released when it ends."""
        _log.error("a step takes more than %s s; all requests are cancelled", self._watchdog.timeout_s)
        self._admission.cancel_all()
        self._inbox.cancel_calls()

    def _hang_error(self) -> StepHangs:
        return StepHangs(f"engine: a step takes more than {self._watchdog.timeout_s} s")

    def _request_ended(self, request: Request) -> None:
        self.adapters.release(request.adapter)
        self._admission.leave(request)  # last: if a bug raises before, `abandon` still fails the request

    @contextlib.contextmanager
    def _acquired(self, params: PrefillParams) -> Iterator[KeyedPrompt]:
        """Acquire the adapter of a request. If the request is not queued, release it, and notify observers."""
        prompt = None
        try:
            prompt = self.adapters.acquire(params.caller, params.tokens)
            yield prompt
        except BaseException as error:
            if prompt is not None:
                self.adapters.release(prompt.adapter)
            if isinstance(error, RadixKVError):
                self._core.observer.request_refused(error)
            raise

    def _submit(self, request: Request) -> None:
        if self._watchdog.is_hanging:
            raise self._hang_error()
        self._admission.enter(request, self._queue)
        if self._watchdog.is_hanging:  # detected since the check above, after which earlier requests were cancelled
            request.future.cancel()

    def _queue(self, request: Request) -> None:
        self._inbox.put(lambda: self._core.submit(request))

    def _call(self, function: Callable[[], Any], origin: CallOrigin = SERVICE_ORIGIN) -> Future[Any]:
        """Call a short function on the engine's thread, between two steps; see `Inbox.call`."""
        if self._watchdog.is_hanging:
            raise self._hang_error()
        future = self._inbox.call(function, origin)
        if self._watchdog.is_hanging:  # detected since the check above, after which earlier calls were cancelled
            future.cancel()
        return future

    def _call_for(self, tenant: str | None, function: Callable[[], Any]) -> Future[Any]:
        """Call a function for one tenant, or for an administrator, who sees all tenants (None)."""
        kind = CallerKind.ADMIN if tenant is None else CallerKind.TENANT
        return self._call(function, CallOrigin(kind, tenant or ""))

    def _loop(self) -> None:
        try:
            while not self._is_stopping.is_set():
                self._wait_for_work()
                self._watchdog.step_begins()
                self._inbox.run_some()
                self._core.step()
                if self._is_failing and time.monotonic() >= self._next_try_s:
                    self._next_try_s = time.monotonic() + _RETRY_PERIOD_S
                    self._core.try_step()
                self._watchdog.step_ends(is_failing=self._is_failing)
        except BaseException:
            _log.critical("the engine's thread failed and the process ends: this is a bug", exc_info=True)
            raise
        finally:
            self._watchdog.step_ends()  # also if it raised
            self._admission.close()
            self._inbox.close()
            error = Draining("engine: stopped")
            with contextlib.ExitStack() as cleanup:  # runs callbacks in reverse order, even if one of them raises
                cleanup.callback(self._admission.abandon, error)
                cleanup.callback(self._inbox.abandon, error)
                cleanup.callback(self._core.close, error)
                cleanup.callback(self._inbox.run_all)

    def _wait_for_work(self) -> None:
        """Wait for something to run while there is nothing to compute."""
        if not self._core.has_work:
            self._inbox.run_next(_RETRY_PERIOD_S if self._is_failing else self._core.seconds_until_due())
