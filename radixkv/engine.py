"""The loop that turns requests into steps. Its thread is the only one that touches cache, scheduler and model."""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from radixkv.attention import AttentionKernels, TorchKernels
from radixkv.config import Config, EngineConfig, TenantConfig
from radixkv.engine_core import EngineCore
from radixkv.errors import (
    Draining,
    InvalidRequest,
    LifecycleError,
    PromptTooLong,
    QueueFull,
    QuotaExceeded,
    RadixKVError,
    StepHangs,
    UnknownAdapter,
)
from radixkv.eviction_policies import make_policy
from radixkv.kv_storage import KVStorage
from radixkv.model import Model, load_model
from radixkv.model_check import check_model
from radixkv.namespace import Namespace
from radixkv.observer import Observer
from radixkv.prefix_cache import PrefixCache, Purged
from radixkv.request import MAX_REQUEST_PRIORITY, Generation, PrefillParams, Request
from radixkv.result import GeneratedTokens, GenerateResult, PrefillResult, ProbeResult, Retained
from radixkv.retention import Retention
from radixkv.runner import Runner
from radixkv.sampling import Sampling
from radixkv.stats import EngineLoad, EngineStats
from radixkv.tenants import Quota
from radixkv.token_bytes import TOKEN_BYTES
from radixkv.watchdog import Watchdog

_T = TypeVar("_T")

# So many failed steps in a row, and the engine is not healthy; it tries a step of its own so often until one works.
_MAX_FAILED_STEPS = 3
_RETRY_PERIOD_S = 1.0

# Bounds of the hint when to come back to a full queue.
_MIN_RETRY_S, _DEFAULT_RETRY_S, _MAX_RETRY_S = 0.05, 1.0, 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine serves and accepts.

    Attributes:
        max_prompt_tokens: what both the model and the whole block pool can hold.
        max_sequence_tokens: prompt and generated tokens together; a block less of the pool, because a generation goes
            on in a copy of the block in which its prompt ends.
        epoch: identifies this life of the block pool; block ids of another epoch mean nothing.
    """

    model: str
    device: str
    vocab_size: int
    max_prompt_tokens: int
    max_sequence_tokens: int
    block_size: int
    epoch: int


class Engine:
    """An `EngineCore` on a thread of its own, which is the only one that touches cache, scheduler and model.

    All methods may be called from any thread. A future that is cancelled cancels its request at the next chunk
    boundary; its blocks go back, and what it had published stays cached.
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
        pool_tokens = cache.pool.num_blocks * cache.block_size
        self.limits = Limits(
            model=model.name,
            device=str(model.device),
            vocab_size=model.vocab_size,
            max_prompt_tokens=min(pool_tokens, model.max_tokens or pool_tokens),
            max_sequence_tokens=min(pool_tokens - cache.block_size, model.max_tokens or pool_tokens),
            block_size=cache.block_size,
            epoch=secrets.randbits(63),
        )
        self._model_fingerprint = model.fingerprint
        self._eos_token_ids = model.eos_token_ids
        self._observer = observer or Observer()
        self._core = EngineCore(
            runner, cache, config, on_end=self._forget_unfinished, observer=self._observer, weights=weights
        )
        self._step_timeout_s = config.step_timeout_s
        self._max_tenant_requests = config.max_tenant_requests
        self._max_unfinished = config.max_waiting_requests + config.max_running_requests
        self._watchdog = Watchdog(config.step_timeout_s, self._on_hang)
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="radixkv-engine", daemon=True)
        self._is_stopping = False
        self._is_draining = False
        self._is_stopped = False
        self._unfinished: set[Future[Any]] = set()
        self._num_unfinished: Counter[str] = Counter()  # by tenant
        self._ended_s: deque[float] = deque(maxlen=64)  # when the last requests ended
        self._unfinished_changed = threading.Condition()

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs. Once started, it ends only with `stop`, or with a bug of ours."""
        return self._thread.is_alive()

    @property
    def is_healthy(self) -> bool:
        """Whether new requests are taken, and steps neither hang nor fail one after the other."""
        is_working = not self._watchdog.is_hanging and self._core.num_failed_steps < _MAX_FAILED_STEPS
        return self._thread.is_alive() and not self._is_draining and is_working

    @property
    def cancellation(self) -> LifecycleError:
        """Why the engine cancels a future that its caller did not cancel."""
        return self._hanging() if self._watchdog.is_hanging else Draining("engine: stopped before the answer was known")

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
            namespace = self._validated(params, params.num_tokens)
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
            namespace = self._validated_generation(params, sampling)
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
        self._validate_tokens(tokens)

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
        self._validate_tokens(tokens)
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
        """Refuse new prefills and wait for the others; cancel what is left after `timeout_s`.

        Returns:
            Whether all of them finished in time.
        """
        with self._unfinished_changed:
            self._is_draining = True
            finished = self._unfinished_changed.wait_for(lambda: not self._unfinished, timeout_s)
            left = list(self._unfinished)
        for future in left:
            future.cancel()
        return finished

    def stop(self) -> None:
        """Cancel what is left and end the thread."""
        self.drain(0)
        self._inbox.put(self._leave_loop)
        self._thread.join()
        self._watchdog.stop()

    def _leave_loop(self) -> None:
        self._is_stopping = True

    def _on_hang(self) -> None:
        """Let nobody wait for a step that hangs. The blocks go back when it ends, and not while it may still write."""
        _log.error("a step takes more than %s s; its requests and all others are cancelled", self._step_timeout_s)
        with self._unfinished_changed:
            left = list(self._unfinished)
        for future in left:
            future.cancel()

    def _hanging(self) -> StepHangs:
        return StepHangs(f"engine: a step takes more than {self._step_timeout_s} s")

    def _forget_unfinished(self, request: Request) -> None:
        with self._unfinished_changed:
            self._unfinished.discard(request.future)
            self._num_unfinished -= Counter((request.params.tenant,))
            self._ended_s.append(time.monotonic())
            self._unfinished_changed.notify_all()

    def _seconds_to_end(self, num_requests: int) -> float:
        """How long it takes until so many requests have ended, as fast as the last ones did."""
        if len(self._ended_s) < 2:
            return _DEFAULT_RETRY_S
        seconds_each = (time.monotonic() - self._ended_s[0]) / len(self._ended_s)
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, num_requests * seconds_each))

    def _namespace(self, tenant: str, adapter: str, salt: str) -> Namespace:
        if adapter:
            raise UnknownAdapter("adapter: expected the name of a loaded adapter, got an unknown one")
        return Namespace(self._model_fingerprint, tenant, adapter, salt)

    @contextlib.contextmanager
    def _telling_of_refusal(self) -> Iterator[None]:
        try:
            yield
        except RadixKVError as error:
            self._observer.request_refused(error)
            raise

    def _validated_generation(self, params: PrefillParams, sampling: Sampling) -> Namespace:
        sampling.validate(self.limits.vocab_size)
        params.require_generable()
        namespace = self._validated(params, params.num_tokens + sampling.max_new_tokens - 1)
        most_tokens = self.limits.max_sequence_tokens
        if params.num_tokens + sampling.max_new_tokens > most_tokens:
            raise PromptTooLong(
                f"token_ids, max_new_tokens: expected at most {most_tokens} tokens together, got "
                f"{params.num_tokens} and {sampling.max_new_tokens}"
            )
        return namespace

    def _validated(self, params: PrefillParams, num_tokens: int) -> Namespace:
        """Refuse a request that is wrong, or whose `num_tokens` could never be held; returns its namespace."""
        namespace = self._namespace(params.tenant, params.adapter, params.salt)
        self._validate_tokens(params.tokens)
        if params.retention is not None:
            params.retention.range_in(params.num_tokens)
        if not 0 <= params.top_logprobs <= self.limits.vocab_size:
            raise InvalidRequest(f"top_logprobs: expected 0 to {self.limits.vocab_size}, got {params.top_logprobs}")
        if not 0 <= params.priority <= MAX_REQUEST_PRIORITY:
            raise InvalidRequest(f"priority: expected 0 to {MAX_REQUEST_PRIORITY}, got {params.priority}")
        cache = self._core.cache  # quotas never change
        bounds = cache.tenants.with_quota.get(params.tenant)
        ceiling_blocks = None if bounds is None else bounds.quota.ceiling_blocks
        if ceiling_blocks is not None and num_tokens > ceiling_blocks * cache.block_size:
            raise QuotaExceeded(
                f"token_ids: expected at most this tenant's ceiling of {ceiling_blocks * cache.block_size} tokens, got "
                f"{num_tokens}"
            )
        return namespace

    def _submit(self, request: Request) -> None:
        with self._unfinished_changed:
            if self._is_draining:
                raise Draining("engine: shutting down, no new requests")
            if self._watchdog.is_hanging:
                raise self._hanging()
            tenant = request.params.tenant
            for num_unfinished, most, whose in (
                (len(self._unfinished), self._max_unfinished, ""),
                (self._num_unfinished[tenant], self._max_tenant_requests, " of this tenant"),
            ):
                if num_unfinished >= most:
                    raise QueueFull(
                        f"engine: expected fewer than {most} unfinished requests{whose}, got {num_unfinished}",
                        retry_after_s=self._seconds_to_end(num_unfinished // 2),
                    )
            self._unfinished.add(request.future)
            self._num_unfinished[tenant] += 1
            self._inbox.put(lambda: self._core.submit(request))

    def _validate_tokens(self, tokens: bytes) -> None:
        if len(tokens) % TOKEN_BYTES:
            raise InvalidRequest(f"token_ids: expected little-endian uint32 ids, got {len(tokens)} bytes")
        ids = np.frombuffer(tokens, dtype="<u4")
        if ids.size == 0:
            raise InvalidRequest("token_ids: expected at least 1 token, got 0")
        if ids.size > self.limits.max_prompt_tokens:
            raise PromptTooLong(f"token_ids: expected at most {self.limits.max_prompt_tokens} tokens, got {ids.size}")
        if ids.max() >= self.limits.vocab_size:
            index = int(np.argmax(ids >= self.limits.vocab_size))
            vocab_size = self.limits.vocab_size
            raise InvalidRequest(f"token_ids[{index}]: expected an id below the vocabulary size {vocab_size}, got more")

    def _call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run a short function on the engine's thread, between two steps."""
        future: Future[_T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:  # noqa: BLE001 - it is the caller's, and the engine goes on
                    future.set_exception(error)

        with self._unfinished_changed:
            if self._is_stopped:
                raise Draining("engine: stopped")
            self._inbox.put(run)
        return future

    def _loop(self) -> None:
        try:
            while not self._is_stopping:
                self._read_inbox()
                self._watchdog.step_begins()
                self._core.step()
                if self._core.num_failed_steps >= _MAX_FAILED_STEPS and not self._core.has_work:
                    self._core.try_step()
                self._watchdog.step_ends()
        finally:
            with self._unfinished_changed:
                self._is_draining = self._is_stopped = True  # nothing enters the inbox any more
            self._read_inbox(wait=False)
            self._core.close(Draining("engine: stopped"))

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


def build_engine(config: Config, observer: Observer | None = None) -> Engine:
    """Load the model, check it, allocate the pool; the engine still has to be started.

    Raises:
        ConfigError: the model can't be loaded or served, or the pool does not fit into memory.
    """
    model = load_model(config.model)
    kernels = attention_kernels(model)
    kv_shape = model.kv_shape.stored_as(config.cache.kv_dtype)
    check_model(model, kernels, config.cache.block_size, kv_shape)
    storage = KVStorage(config.cache.num_blocks, config.cache.block_size, kv_shape, model.device)
    cache = PrefixCache(
        storage.num_blocks,
        storage.block_size,
        policy=make_policy(config.cache.policy, storage.num_blocks),
        quotas={tenant: _quota(bounds, storage.block_size) for tenant, bounds in config.tenants.items()},
        max_retained_blocks=int(config.cache.max_retained_share * storage.num_blocks),
        evicted_prefixes=config.cache.evicted_prefixes,
    )
    weights = {tenant: bounds.weight for tenant, bounds in config.tenants.items()}
    return Engine(Runner(model, storage, kernels), cache, config.engine, weights=weights, observer=observer)


def _quota(bounds: TenantConfig, block_size: int) -> Quota:
    ceiling, retained = bounds.ceiling_tokens, bounds.max_retained_tokens
    return Quota(
        floor_blocks=-(-bounds.floor_tokens // block_size),
        ceiling_blocks=None if ceiling is None else ceiling // block_size,
        max_retained_blocks=None if retained is None else retained // block_size,
    )


def attention_kernels(model: Model) -> AttentionKernels:
    """What works on the pool, where the model runs."""
    if model.device.type == "cuda":
        from radixkv.triton_kernels import TritonKernels  # Triton is not there on every platform

        return TritonKernels(is_exact=model.is_exact)
    return TorchKernels()
