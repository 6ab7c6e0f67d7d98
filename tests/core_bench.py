"""An engine core over a fake runner, run step by step, with a clock that only tests move."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from radixkv.api.caller import Caller
from radixkv.api.params import PrefillParams
from radixkv.api.result import GeneratedTokens, GenerationFuture, PrefillResult
from radixkv.api.sampling import Sampling
from radixkv.cache.changes import Listener
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.purge import Purged, all_slices
from radixkv.cache.recurrent_states import StateSlots
from radixkv.cache.tenant_ledger import TenantLedger
from radixkv.cache.tenants import Quota
from radixkv.config import EngineConfig
from radixkv.engine.core import EngineCore
from radixkv.engine.observer import Observer
from radixkv.engine.statement_feed import StatementFeed
from radixkv.namespace import Namespace
from radixkv.scheduling.request import Generation, Request
from radixkv.statements.quota_shadow import QuotaShadows
from tests.fake_runner import FakeRunner, tokens
from tests.fakes import FakeClock

BLOCK_SIZE = 4
_SAMPLING_FIELDS = {field.name for field in dataclasses.fields(Sampling)} - {"max_new_tokens"}


def purge_at_once(core: EngineCore, *, tenant: str | None, salt: str | None = None) -> Purged:
    """Purge namespaces without a step in between, and without waiting for responses of stores."""
    return all_slices(core.purge_in_slices(tenant=tenant, adapter=None, salt=salt)).purged


class Bench:
    """An engine core over a fake runner, with a clock that only tests move.

    With `num_snapshots`, the fake model has recurrent states, and the cache has that many snapshots for them.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        quotas: dict[str, Quota] | None = None,
        weights: dict[str, float] | None = None,
        observers: Iterable[Observer] = (),
        probation_share: float = 1.0,
        num_snapshots: int | None = None,
        every_tokens: int = 16,
        has_ledger: bool = False,
        shadows: QuotaShadows | None = None,
        listeners: Iterable[Listener] = (),
        **config: object,
    ) -> None:
        self.clock = FakeClock()
        self.has_pending_calls = False  # while it is true, no step is started ahead
        engine_config = EngineConfig(**config)
        ledger = None
        if has_ledger:
            ledger = TenantLedger(BLOCK_SIZE, clock=self.clock)
            observers = (*observers, StatementFeed(ledger, shadows))
        states = None
        if num_snapshots is not None:
            num_requests = engine_config.max_running_requests
            states = StateSlots(num_blocks, BLOCK_SIZE, num_requests, num_snapshots, every_tokens)
        self.cache = PrefixCache(
            num_blocks,
            BLOCK_SIZE,
            quotas=quotas,
            max_held_blocks=2 * num_blocks,
            probation_share=probation_share,
            listeners=listeners,
            clock=self.clock,
            state_slots=states,
            ledger=ledger,
        )
        self.runner = FakeRunner(num_blocks, BLOCK_SIZE)
        self.runner.has_states = states is not None
        self.core = EngineCore.build(
            self.runner,
            self.cache,
            engine_config,
            clock=self.clock,
            work_clock=self.clock,
            observers=observers,
            weights=weights,
            has_pending_calls=lambda: self.has_pending_calls,
        )

    def submit(
        self, ids: range | list[int], tenant: str = "", adapter: str = "", salt: str = "", **params: object
    ) -> Future[PrefillResult]:
        future: Future[PrefillResult] = Future()
        request_params = PrefillParams(tokens(ids), Caller(tenant, adapter, salt), **params)
        self.core.submit(Request(request_params, Namespace("fake", tenant, adapter), future, self.clock()))
        return future

    def generate(
        self,
        ids: range | list[int],
        max_new_tokens: int,
        on_tokens: Callable[[GeneratedTokens], None] = lambda _: None,
        tenant: str = "",
        **params: object,
    ) -> GenerationFuture:
        """Submit a generation. Streamed tokens are appended to `future.streamed`, and chunks passed to `on_tokens`.

        `params` are fields of PrefillParams and of Sampling.
        """
        future = GenerationFuture()
        sampling = Sampling(max_new_tokens, **{name: params.pop(name) for name in _SAMPLING_FIELDS & params.keys()})
        future.streamed = []  # type: ignore[attr-defined]

        def stream(chunk: GeneratedTokens) -> None:
            future.streamed.extend(chunk.token_ids)  # type: ignore[attr-defined]
            on_tokens(chunk)

        generation = Generation(sampling, sampling.stop_token_ids, stream)
        request_params = PrefillParams(tokens(ids), Caller(tenant), **params)
        self.core.submit(Request(request_params, Namespace("fake", tenant), future, self.clock(), generation))
        return future

    def run(self) -> None:
        while self.core.has_work:
            self.core.step()
            self.cache.check()

    def prefill(self, ids: range | list[int], **params: object) -> PrefillResult:
        future = self.submit(ids, **params)
        self.run()
        return future.result(0)
