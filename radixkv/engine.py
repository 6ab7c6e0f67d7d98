"""The loop that turns requests into steps. Its thread is the only one that touches cache, scheduler and model."""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from radixkv.attention import AttentionKernels, TorchKernels
from radixkv.config import Config, EngineConfig, TenantConfig
from radixkv.engine_core import EngineCore
from radixkv.errors import (
    Draining,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
    UnknownAdapter,
)
from radixkv.eviction_policies import make_policy
from radixkv.kv_storage import KVStorage
from radixkv.model import Model, load_model
from radixkv.model_check import check_model
from radixkv.namespace import Namespace
from radixkv.prefix_cache import PrefixCache, Purged
from radixkv.request import PrefillParams, PrefillResult, ProbeResult, Request, Retained
from radixkv.retention import Retention
from radixkv.runner import Runner
from radixkv.stats import EngineStats
from radixkv.tenants import Quota
from radixkv.token_bytes import TOKEN_BYTES

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine serves and accepts.

    Attributes:
        max_prompt_tokens: what both the model and the whole block pool can hold.
        epoch: identifies this life of the block pool; block ids of another epoch mean nothing.
    """

    model: str
    device: str
    vocab_size: int
    max_prompt_tokens: int
    block_size: int
    epoch: int


class Engine:
    """An `EngineCore` on a thread of its own, which is the only one that touches cache, scheduler and model.

    All methods may be called from any thread. A future that is cancelled cancels its request at the next chunk
    boundary; its blocks go back, and what it had published stays cached.
    """

    def __init__(self, runner: Runner, cache: PrefixCache, config: EngineConfig) -> None:
        model = runner.model
        pool_tokens = cache.pool.num_blocks * cache.block_size
        self.limits = Limits(
            model=model.name,
            device=str(model.device),
            vocab_size=model.vocab_size,
            max_prompt_tokens=min(pool_tokens, model.max_tokens or pool_tokens),
            block_size=cache.block_size,
            epoch=secrets.randbits(63),
        )
        self._model_fingerprint = model.fingerprint
        self._core = EngineCore(runner, cache, config, on_end=self._forget_unfinished)
        self._max_unfinished = config.max_waiting_requests + config.max_running_requests
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="radixkv-engine", daemon=True)
        self._is_stopping = False
        self._is_draining = False
        self._is_stopped = False
        self._unfinished: set[Future[PrefillResult]] = set()
        self._unfinished_changed = threading.Condition()

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs. Once started, it ends only with `stop`, or with a bug of ours."""
        return self._thread.is_alive()

    @property
    def is_healthy(self) -> bool:
        """Whether new requests are taken and answered."""
        return self._thread.is_alive() and not self._is_draining

    def start(self) -> None:
        """Start the engine's thread."""
        self._thread.start()

    def prefill(self, params: PrefillParams) -> Future[PrefillResult]:
        """Queue a prefill.

        Raises:
            InvalidRequest, PromptTooLong, UnknownAdapter: the request is wrong.
            QueueFull: too many requests are unfinished.
            Draining: the engine is shutting down.
            Later, through the future: OutOfBlocks, DeadlineExceeded, StepFailed.
        """
        namespace = self._namespace(params.tenant, params.adapter, params.salt)
        self._validate_tokens(params.tokens)
        if params.retention is not None:
            params.retention.range_in(len(params.tokens) // TOKEN_BYTES)
        if not 0 <= params.top_logprobs <= self.limits.vocab_size:
            raise InvalidRequest(f"top_logprobs: expected 0 to {self.limits.vocab_size}, got {params.top_logprobs}")
        future: Future[PrefillResult] = Future()
        request = Request(params, namespace, future, received_s=time.monotonic())
        with self._unfinished_changed:
            if self._is_draining:
                raise Draining("engine: shutting down, no new requests")
            if len(self._unfinished) >= self._max_unfinished:
                raise QueueFull(f"engine: {len(self._unfinished)} requests are unfinished already")
            self._unfinished.add(future)
            self._inbox.put(lambda: self._core.submit(request))
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

    def _leave_loop(self) -> None:
        self._is_stopping = True

    def _forget_unfinished(self, request: Request) -> None:
        with self._unfinished_changed:
            self._unfinished.discard(request.future)
            self._unfinished_changed.notify_all()

    def _namespace(self, tenant: str, adapter: str, salt: str) -> Namespace:
        if adapter:
            raise UnknownAdapter("adapter: expected the name of a loaded adapter, got an unknown one")
        return Namespace(self._model_fingerprint, tenant, adapter, salt)

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
                self._core.step()
        finally:
            with self._unfinished_changed:
                self._is_draining = self._is_stopped = True  # nothing enters the inbox any more
            self._read_inbox(wait=False)
            self._core.close(Draining("engine: stopped"))

    def _read_inbox(self, *, wait: bool = True) -> None:
        """Run what is in the inbox now; sleep on it while there is nothing to compute."""
        if wait and not self._core.has_work:
            with contextlib.suppress(queue.Empty):
                self._inbox.get(timeout=self._core.seconds_to_next_expiry())()
        for _ in range(self._inbox.qsize()):
            self._inbox.get()()


def build_engine(config: Config) -> Engine:
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
    return Engine(Runner(model, storage, kernels), cache, config.engine)


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
