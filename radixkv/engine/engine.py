"""The loop that turns requests into steps. Its thread is the only one that touches cache, scheduler and model."""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from radixkv.api.limits import Limits
from radixkv.api.params import PrefillParams
from radixkv.api.result import GeneratedTokens, GenerateResult, PrefillResult, ProbeResult, Retained
from radixkv.api.retention import Retention
from radixkv.api.sampling import Sampling
from radixkv.api.stats import EngineLoad, EngineStats
from radixkv.cache.prefix_cache import PrefixCache, Purged
from radixkv.compute.runner import Runner
from radixkv.config import EngineConfig
from radixkv.engine.core import EngineCore
from radixkv.engine.gate import Intake
from radixkv.engine.observer import Observer
from radixkv.engine.watchdog import Watchdog
from radixkv.errors import (
    Draining,
    LifecycleError,
    RadixKVError,
    StepHangs,
    UnknownAdapter,
)
from radixkv.namespace import Namespace
from radixkv.scheduling.request import Generation, Request
from radixkv.tokens import TOKEN_BYTES

_T = TypeVar("_T")

# So many failed steps in a row, and the engine is not healthy; it tries a step of its own so often until one works.
_MAX_FAILED_STEPS = 3
_RETRY_PERIOD_S = 1.0
_STOP_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class Engine:
    """An `EngineCore` on a thread of its own, which is the only one that touches cache, scheduler and model.

    All methods may be called from any thread. A future that is cancelled cancels its request at the next chunk
    boundary; its blocks go back, and what it had published stays cached.

    Attributes:
        limits: what it serves and accepts.
        pool_tokens: what its pool holds.
    """

    def __init__(
        self,
        runner: Runner,
        cache: PrefixCache,
        config: EngineConfig,
        *,
        weights: dict[str, float] | None = None,
        observer: Observer | None = None,
    ) -> None:
        model = runner.model
        self.pool_tokens = pool_tokens = cache.pool.num_blocks * cache.block_size
        self.limits = Limits(
            model=model.name,
            device=str(model.device),
            vocab_size=model.vocab_size,
            max_prompt_tokens=min(pool_tokens, model.max_tokens or pool_tokens),
            max_sequence_tokens=min(pool_tokens - cache.block_size, model.max_tokens or pool_tokens),
            block_size=cache.block_size,
            epoch=secrets.randbits(63),
            ceiling_tokens={
                tenant: usage.quota.ceiling_blocks * cache.block_size
                for tenant, usage in cache.tenants.with_quota.items()
                if usage.quota.ceiling_blocks is not None
            },
        )
        self._model_fingerprint = model.fingerprint
        self._eos_token_ids = model.eos_token_ids
        self._intake = Intake(config)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._core = EngineCore(
            runner,
            cache,
            config,
            on_end=self._intake.leave,
            observer=observer,
            weights=weights,
            has_news=lambda: not self._inbox.empty(),
        )
        self._watchdog = Watchdog(config.step_timeout_s, self._on_hang)
        self._thread = threading.Thread(target=self._loop, name="radixkv-engine", daemon=True)
        self._is_stopping = False
        self._is_stopped = False
        self._inbox_lock = threading.Lock()  # of `_is_stopped` and who enters `_calls`: what is in the inbox is run
        self._calls: set[Future[Any]] = set()  # under way
        self._next_try_s = 0.0

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs. Once started, it ends only with `stop`, or with a bug of ours."""
        return self._thread.is_alive()

    @property
    def is_healthy(self) -> bool:
        """Whether new requests are taken, and steps neither hang nor fail one after the other."""
        is_working = not self._watchdog.is_hanging and self._core.num_failed_steps < _MAX_FAILED_STEPS
        return self._thread.is_alive() and not self._intake.is_closed and is_working

    @property
    def cancellation(self) -> LifecycleError:
        """Why the engine cancels a future that its caller did not cancel: it stops, or else a step hangs or did."""
        if self._intake.is_closed:
            return Draining("engine: stopped before the answer was known")
        return self._hanging()

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()
        self._watchdog.start()

    def prefill(self, params: PrefillParams) -> Future[PrefillResult]:
        """Queue a prefill.

        Raises:
            InvalidRequest, PromptTooLong, UnknownAdapter: the request is wrong.
            QueueFull: too many requests are unfinished, or too many of this tenant.
            QuotaExceeded: the tenant may not hold so much.
            Draining, StepHangs: the engine takes no requests.
            Later, through the future: OutOfBlocks, DeadlineExceeded, StepFailed.
        """
        future: Future[PrefillResult] = Future()
        with self._telling_of_refusal():
            namespace = self._namespace(params.tenant, params.adapter, params.salt)
            self.limits.require_prefill(params)
            self._submit(Request(params, namespace, future, received_s=time.monotonic()))
        return future

    def generate(
        self, params: PrefillParams, sampling: Sampling, on_tokens: Callable[[GeneratedTokens], None]
    ) -> Future[GenerateResult]:
        """Queue a prompt that is to be continued.

        Args:
            params: the prompt.
            sampling: how, and how far.
            on_tokens: called on the engine's thread with every new token but the last, which comes with the result. It
                must be quick; if it raises, the request fails.

        Raises:
            As `prefill`.
        """
        future: Future[GenerateResult] = Future()
        with self._telling_of_refusal():
            namespace = self._namespace(params.tenant, params.adapter, params.salt)
            self.limits.require_generation(params, sampling)
            stop_token_ids = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else self._eos_token_ids)
            generation = Generation(sampling, stop_token_ids, on_tokens)
            self._submit(Request(params, namespace, future, time.monotonic(), generation))
        return future

    def probe(self, tokens: bytes, *, tenant: str = "", adapter: str = "", salt: str = "") -> Future[ProbeResult]:
        """Ask what a prefill would reuse now. Computes and changes nothing.

        Raises:
            InvalidRequest, PromptTooLong, UnknownAdapter: the request is wrong.
        """
        namespace = self._namespace(tenant, adapter, salt)
        self.limits.require_tokens(tokens)

        def probe() -> ProbeResult:
            cache = self._core.cache
            cached_tokens = cache.match(namespace, tokens).cached_tokens
            return ProbeResult(
                cached_tokens, len(tokens) // TOKEN_BYTES, cache.explain(namespace, tokens, cached_tokens)
            )

        return self._call(probe)

    def release(self, lease_id: str, *, tenant: str = "") -> Future[None]:
        """Give a held lease back. The future raises UnknownLease if this tenant holds no such lease."""
        return self._call(lambda: self._core.held_leases.release(lease_id, tenant))

    def retain(
        self, tokens: bytes, retention: Retention, *, tenant: str = "", adapter: str = "", salt: str = ""
    ) -> Future[Retained]:
        """Give a cached range a priority, whatever it had before; see `PrefixCache.retain`.

        Raises:
            InvalidRequest, PromptTooLong, UnknownAdapter: the request is wrong.
        """
        namespace = self._namespace(tenant, adapter, salt)
        self.limits.require_tokens(tokens)
        retention.range_in(len(tokens) // TOKEN_BYTES)
        return self._call(lambda: self._core.retain(namespace, tokens, retention))

    def purge(
        self, *, tenant: str | None = None, adapter: str | None = None, salt: str | None = None
    ) -> Future[Purged]:
        """Forget namespaces; None is any. See `PrefixCache.purge`.

        Raises:
            UnknownAdapter: there is no adapter of this name.
        """
        if adapter is not None:
            self._namespace("", adapter, "")
        return self._call(lambda: self._core.purge(tenant=tenant, adapter=adapter, salt=salt))

    def stats(self) -> Future[EngineStats]:
        """Take a picture of the engine."""
        return self._call(self._core.stats)

    def load(self) -> Future[EngineLoad]:
        """Ask how full the engine is; cheaper than `stats`, for those who ask often."""
        return self._call(self._core.load)

    def check(self) -> Future[None]:
        """Recount every invariant of the cache. The future raises InvariantViolation if one does not hold."""
        return self._call(self._core.cache.check)

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the others; cancel what is left after `timeout_s`.

        Returns:
            Whether all of them finished in time.
        """
        self._intake.close()
        is_answered = self._intake.wait_until_answered(timeout_s)
        self._intake.cancel_all()
        return is_answered and not self._watchdog.is_hanging

    def stop(self) -> None:
        """Cancel what is left and end the thread; it is left behind if its step does not end."""
        self.drain(0)
        self._inbox.put(self._leave_loop)
        self._thread.join(_STOP_TIMEOUT_S)
        if self._thread.is_alive():
            _log.error("a step does not end; its thread is left behind")
        self._watchdog.stop()

    def _leave_loop(self) -> None:
        self._is_stopping = True

    def _on_hang(self) -> None:
        """Let nobody wait for a step that hangs. The blocks go back when it ends, and not while it may still write."""
        _log.error("a step takes more than %s s; its requests and all others are cancelled", self._watchdog.timeout_s)
        self._intake.cancel_all()
        with self._inbox_lock:
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def _hanging(self) -> StepHangs:
        return StepHangs(f"engine: a step takes more than {self._watchdog.timeout_s} s")

    def _namespace(self, tenant: str, adapter: str, salt: str) -> Namespace:
        if adapter:
            raise UnknownAdapter("adapter: expected the name of a loaded adapter, got an unknown one")
        return Namespace(self._model_fingerprint, tenant, adapter, salt)

    @contextlib.contextmanager
    def _telling_of_refusal(self) -> Iterator[None]:
        try:
            yield
        except RadixKVError as error:
            self._core.observer.request_refused(error)
            raise

    def _submit(self, request: Request) -> None:
        if self._watchdog.is_hanging:
            raise self._hanging()
        self._intake.enter(request, lambda: self._inbox.put(lambda: self._core.submit(request)))
        if self._watchdog.is_hanging:  # since a moment ago, and all others have been cancelled
            request.future.cancel()

    def _call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run a short function on the engine's thread, between two steps."""
        future: Future[_T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:  # noqa: BLE001 - it is the caller's, and the engine goes on
                    future.set_exception(error)

        with self._inbox_lock:
            if self._is_stopped:
                raise Draining("engine: stopped")
            if self._watchdog.is_hanging:
                raise self._hanging()
            self._calls.add(future)
            self._inbox.put(run)
        future.add_done_callback(self._calls.discard)
        return future

    def _loop(self) -> None:
        try:
            while not self._is_stopping:
                self._read_inbox()
                self._watchdog.step_begins()
                self._core.step()
                if self._core.num_failed_steps >= _MAX_FAILED_STEPS and time.monotonic() >= self._next_try_s:
                    self._next_try_s = time.monotonic() + _RETRY_PERIOD_S
                    self._core.try_step()
                self._watchdog.step_ends()
        finally:
            self._intake.close()
            with self._inbox_lock:
                self._is_stopped = True  # nothing enters the inbox any more
            self._read_inbox(wait=False)
            try:
                self._core.close(Draining("engine: stopped"))
            finally:
                self._intake.abandon(Draining("engine: stopped"))

    def _read_inbox(self, *, wait: bool = True) -> None:
        """Run what is in the inbox now; sleep on it while there is nothing to compute."""
        if wait and not self._core.has_work:
            timeout_s = self._core.seconds_to_next_expiry()
            if self._core.num_failed_steps >= _MAX_FAILED_STEPS:
                timeout_s = _RETRY_PERIOD_S
            with contextlib.suppress(queue.Empty):
                self._inbox.get(timeout=timeout_s)()
        for _ in range(self._inbox.qsize()):
            self._inbox.get()()
