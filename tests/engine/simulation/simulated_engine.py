"""A whole engine in virtual time, its callers, and an oracle that checks every step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from radixkv.api.caller import Caller
from radixkv.api.limits import Limits
from radixkv.api.params import PrefillParams
from radixkv.api.result import GeneratedTokens, GenerationFuture
from radixkv.cache.lease import Lease
from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import EngineConfig
from radixkv.engine.adapters.adapters import Adapters
from radixkv.engine.core import EngineCore
from radixkv.engine.inbox import EngineThread
from radixkv.engine.public_prefixes import PublicPrefixRegistry
from radixkv.errors import Draining, OutOfBlocks, RadixKVError, UnknownAdapter, UnknownLease
from radixkv.namespace import PUBLIC_TENANT
from radixkv.scheduling.request import Generation, Request
from radixkv.tokens import TOKEN_BYTES
from tests.adapter_doubles import FakeDevice
from tests.core_bench import purge_at_once
from tests.engine.simulation.answer_oracle import RequestRecord
from tests.engine.simulation.engine_events import (
    Ask,
    Cancel,
    Close,
    Event,
    Fail,
    Finish,
    Load,
    Purge,
    Register,
    Release,
    Retain,
    Unload,
    Unregister,
    World,
    tokens_of,
)
from tests.engine.simulation.engine_oracle import EngineOracle
from tests.engine.simulation.public_oracle import PublicPrefixRecord
from tests.engine.simulation.simulated_model import Part, SimulatedRunner, index_of_broken_part
from tests.events.event_oracle import WatchedCache
from tests.fakes import FakeClock

_FAILED_STEPS_TO_TRY = 3  # as `Engine` does
_EVENT_BLOCK_SIZE = 3  # neither a divisor nor a multiple of the block size


class CallbackFailed(Exception):
    """A caller's callback raised, as the script demands."""


class SimulatedEngine:
    """One engine, its callers and the oracle.

    time     ── step ──┬── step ──────────┬── step ──▶       only the runner advances the clock; if there is nothing
    events      cancel ┘ ask, purge, ...  ┘ cancel           to compute, the clock skips to the next event
    """

    def __init__(self, world: World, events: Iterable[Event]) -> None:
        events = list(events)
        self.clock = FakeClock()
        self.watch = WatchedCache(_EVENT_BLOCK_SIZE, world.block_size)
        self.cache = _make_cache(world, self.clock, self.watch)
        self.watch.feed.switch_on(self.cache.nodes)
        failures = {event.step: event.how for event in events if isinstance(event, Fail)}
        self.runner = SimulatedRunner(
            self.cache, self.clock, world.step_s, world.token_s, failures, on_compute=self._during_step
        )
        config = EngineConfig(
            max_step_tokens=world.max_step_tokens,
            max_running_requests=world.max_running_requests,
            held_lease_ttl_s=world.held_lease_ttl_s,
        )
        self.oracle = EngineOracle(world, self.cache, self.runner, self.clock)
        self.core = self.oracle.core = EngineCore.build(
            self.runner,
            self.cache,
            config,
            clock=self.clock,
            work_clock=self.clock,
            on_end=self._request_ended,
            observers=[self.oracle],
            weights=dict(world.weights),
            events=self.watch.feed,
        )
        self.device = _ReportingDevice(self.oracle.public.record_removed_adapter)
        self._posted: deque[Callable[[], None]] = deque()  # functions that the engine's thread will call between steps
        self._is_stepping = False
        thread = EngineThread(self._between_steps, self._posted.append, lambda: Draining("stopped"))
        self.adapters = Adapters("simulated", self.device.source(8), self.cache, thread)
        self.runner.device = self.device
        self.runner.leases = self._list_leases
        limits = _limits(world)
        self.public = PublicPrefixRegistry(self.cache.public, limits, self.adapters, thread, self._submit_public)
        open_lease = self.cache.lease
        self.cache.lease = lambda *args, **options: self.oracle.public.lease(open_lease, *args, **options)  # type: ignore[method-assign]
        self._timed_events = sorted(
            (event for event in events if not isinstance(event, Fail) and _closing_step(event) is None),
            key=lambda event: event.at_s,
        )
        closing_steps = [step for step in map(_closing_step, events) if step is not None]
        self._closes_after_step = min(closing_steps, default=None)
        self._records: dict[int, RequestRecord] = {}
        self._registration: tuple[str, Ask] | None = None  # name and prompt of the last public prefix
        self._handlers: dict[type, Callable[..., None]] = {
            Ask: self._ask,
            Cancel: self._cancel,
            Finish: self._finish,
            Release: self._release,
            Retain: self._retain,
            Purge: self._purge,
            Load: self._load,
            Unload: self._unload,
            Register: self._register,
            Unregister: self._unregister,
            Close: self._close,
        }

    def run(self) -> Counter[str]:
        """Run the script. Returns the kinds of events, each with its count."""
        while not self.oracle.is_closed:
            self._run_due_events()
            if self.oracle.is_closed:
                break
            if not self.core.has_work and not self._skip_time():
                break
            self._step()
        self._run_posted()
        for each in list(self.cache.public):
            self._unregister(Unregister(0.0, each.name))
        while self._posted:
            self._run_posted()
        self._verify_adapters()
        self.oracle.finish()
        return self.oracle.events

    def _step(self) -> None:
        self._run_posted()
        self.oracle.begin_step()
        self._is_stepping = True
        self.core.step()
        self._is_stepping = False
        if self.core.num_failed_steps >= _FAILED_STEPS_TO_TRY and not self.core.has_work:
            self.core.try_step()
        self.oracle.end_step()
        self.oracle.public.verify(self.public.listing().result(0))
        self.watch.verify(self.cache)
        if self._closes_after_step is not None and self.runner.num_steps >= self._closes_after_step:
            self._close(Close())

    def _skip_time(self) -> bool:
        """Move the clock to the next event, since there is nothing to compute. Returns whether there is an event."""
        expiry_s = self.core.held_leases.next_expiry_s()
        times_s = [event.at_s for event in self._timed_events[:1]] + ([] if expiry_s is None else [expiry_s])
        self.clock.now_s = max(self.clock.now_s, min(times_s, default=0.0))
        return bool(times_s)

    def _run_due_events(self, *, during_step: bool = False) -> None:
        """Run the events whose time has come. While a step computes, callers can only cancel and finish."""
        due = [event for event in self._timed_events if event.at_s <= self.clock.now_s]
        if during_step:
            due = [event for event in due if isinstance(event, Cancel | Finish) and event.during_step]
        for event in due:
            if self.oracle.is_closed:
                break
            self._timed_events.remove(event)
            self._handlers[type(event)](event)

    def _during_step(self, parts: Sequence[Part], failure: str | None) -> None:
        failing_parts: Sequence[Part] = []
        if failure == "not finite":
            failing_parts = [parts[index_of_broken_part(parts)]]
        elif failure in ("before", "after"):
            failing_parts = parts
        elif failure == "no memory":
            self.oracle.record_out_of_memory(parts)
            self._run_due_events(during_step=True)
            return
        records = self.oracle.record_step(parts, failing_parts)
        if failure == "cancelled":
            for record in records:
                self._cancel_request(record)
        self._run_due_events(during_step=True)

    def _ask(self, ask: Ask) -> None:
        try:
            digest, invoked_by = self._resolve_adapter(ask.adapter)
        except UnknownAdapter:
            self.oracle.events["unknown adapters"] += 1
            return
        ask = dataclasses.replace(ask, digest=digest, invoked_by=invoked_by)
        record = RequestRecord(ask, GenerationFuture() if ask.max_new_tokens else Future())
        self._records[ask.key] = record
        params = PrefillParams(
            tokens=ask.tokens,
            caller=Caller(ask.tenant, ask.adapter, ask.salt),
            request_id=str(ask.key),
            read_cache=ask.reads,
            write_cache=ask.writes,
            retention=ask.retention,
            urgency=ask.urgency,
            top_logprobs=0 if ask.max_new_tokens else 2,
            return_logits=not ask.max_new_tokens,
            hold_lease=ask.holds,
            deadline_s=ask.deadline_s,
        )
        generation = None
        if ask.max_new_tokens:
            stop_token_ids = frozenset(ask.stop_token_ids)
            generation = Generation(ask.sampling, stop_token_ids, lambda chunk: self._receive_chunk(record, chunk))
        prompt = self.adapters.acquire(params.caller, params.tokens)
        assert prompt.namespace == ask.namespace
        record.request = prompt.request(params, record.future, generation)
        record.request.times.received_s = self.clock()
        self.oracle.record_submission(record)
        self.core.submit(record.request)

    def _resolve_adapter(self, name: str) -> tuple[str, int | None]:
        """Return the digest to which an adapter's name maps, and the token that invokes the adapter (None for none)."""
        resolved = self.adapters._names.find(name)
        invocation = None if resolved.weights is None else resolved.weights.invocation_token_ids
        return resolved.digest, invocation[0] if invocation else None

    def _register(self, register: Register) -> None:
        """Register a public prefix. Asserts that it is refused only for its name, its length or missing blocks."""
        oracle, cache = self.oracle.public, self.cache
        try:
            digest, invoked_by = self._resolve_adapter(register.adapter)
        except UnknownAdapter:
            return
        ask = Ask(self.clock(), 0, register.prompt, PUBLIC_TENANT, digest=digest, invoked_by=invoked_by)
        tokens = ask.tokens
        num_tokens = len(tokens) // TOKEN_BYTES
        is_possible = oracle.by_name(register.name) is None and num_tokens >= cache.block_size
        has_room = oracle.has_room(num_tokens)
        self._registration = register.name, ask
        registration = self.public.register(register.name, tokens, register.adapter)
        if registration.done():
            error = registration.exception(0)
            assert not (is_possible and has_room), f"a public prefix was refused: {error!r}"
            self.oracle.events["public prefixes refused"] += isinstance(error, OutOfBlocks)
            return
        assert is_possible, "a public prefix was accepted that must be refused"
        assert has_room, "public prefixes take too many blocks"

    def _submit_public(self, request: Request) -> None:
        """Compute a public prefix, as the engine does any request."""
        assert self._registration is not None
        name, ask = self._registration
        prefix_record = self.oracle.public.record_registration(name, request.namespace, request.prompt_tokens)
        record = RequestRecord(dataclasses.replace(ask, salt=request.namespace.salt), request.future)
        record.request = request
        request.times.received_s = self.clock()
        request.future.add_done_callback(lambda future: self._record_public_end(prefix_record, request, future))
        self.oracle.record_submission(record)
        self.core.submit(request)

    def _record_public_end(self, prefix_record: PublicPrefixRecord, request: Request, future: Future[Any]) -> None:
        if future.cancelled() or future.exception(0) is not None:
            self._posted.append(lambda: self._record_public_failure(prefix_record, request))
        else:
            self.oracle.public.record_computed(prefix_record)

    def _record_public_failure(self, prefix_record: PublicPrefixRecord, request: Request) -> None:
        """Record that a prefix is no longer registered, as soon as no request computes it."""
        if request.is_over:
            self.oracle.public.record_failure(prefix_record)
        else:
            self._posted.append(lambda: self._record_public_failure(prefix_record, request))

    def _unregister(self, unregister: Unregister) -> None:
        prefix_record = self.oracle.public.by_name(unregister.name)
        unregistration = self.public.unregister(unregister.name)
        assert (unregistration.exception(0) is None) == (prefix_record is not None)
        if prefix_record is not None:
            self.oracle.public.record_unregistration(prefix_record)

    def _between_steps(self, function: Callable[[], Any]) -> Future[Any]:
        """Call a function between steps: immediately, or after the running step."""
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(function())
            except RadixKVError as error:
                future.set_exception(error)

        if self._is_stepping:
            self._posted.append(call)
        else:
            call()
        return future

    def _list_leases(self) -> list[Lease]:
        """List the leases that the engine computes: those of running requests, and that of a trial step."""
        return [*(each.open_lease for each in self.core._scheduler.running), *self.cache.leases]

    def _request_ended(self, request: Request) -> None:
        self.oracle.record_end(request)
        self.adapters.release(request.adapter)

    def _load(self, load: Load) -> None:
        loaded = self.adapters.load_now(load.name, Path(load.digest))
        self.oracle.events["adapters changed"] += loaded.replaced_digest not in (None, load.digest.partition("+")[0])
        self.oracle.events["adapters that drain"] += any(each.is_draining for each in self.adapters.loaded())

    def _unload(self, unload: Unload) -> None:
        with contextlib.suppress(UnknownAdapter):
            self.adapters.unload(unload.name).result(0)
            self.oracle.events["adapters unloaded"] += 1

    def _run_posted(self) -> None:
        """Run the posted functions, but not those that these post: a step runs first."""
        for _ in range(len(self._posted)):
            self._posted.popleft()()

    def _verify_adapters(self) -> None:
        """Assert that adapters without a name are neither on the device nor have cached K/V."""
        named = {each.digest for each in self.adapters.loaded()}
        assert not any(each.is_draining or each.num_unfinished for each in self.adapters.loaded())
        assert self.device.held == named
        assert {tree.owner.namespace.adapter for tree in self.cache._trees.values()} <= {"", *named}
        self.oracle.events["adapters drained"] += sum(call == "remove" for call, _ in self.device.calls)

    def _receive_chunk(self, record: RequestRecord, chunk: GeneratedTokens) -> None:
        self.oracle.check_chunk(record, chunk)
        if len(record.streamed) == record.ask.cancels_at:
            self._cancel_request(record)
        if len(record.streamed) == record.ask.finishes_at:
            self._finish_generation(record)
        if len(record.streamed) == record.ask.raises_at:
            record.must_fail = True
            raise CallbackFailed

    def _cancel(self, cancel: Cancel) -> None:
        if cancel.key in self._records:
            self._cancel_request(self._records[cancel.key])

    def _cancel_request(self, record: RequestRecord) -> None:
        self.oracle.record_cancellation(record)
        record.future.cancel()

    def _finish(self, finish: Finish) -> None:
        if finish.key in self._records:
            self._finish_generation(self._records[finish.key])

    def _finish_generation(self, record: RequestRecord) -> None:
        if isinstance(record.future, GenerationFuture):
            self.oracle.record_finish(record)
            record.future.finish()

    def _release(self, release: Release) -> None:
        record = self._records.get(release.key)
        if record is None or record.held is None:
            return
        held, record.held = record.held, None
        self.core.held_leases.release(held.lease_id, record.ask.tenant)
        try:
            self.core.held_leases.release(held.lease_id, record.ask.tenant)
        except UnknownLease:
            self.oracle.events["leases released"] += 1
        else:
            raise AssertionError("a lease was released twice")

    def _retain(self, retain: Retain) -> None:
        namespace = Ask(0.0, 0, (), retain.tenant, retain.salt).namespace
        grant = self.core.retain(namespace, tokens_of(retain.prompt, namespace), retain.retention).grant
        self.oracle.events["retained tokens"] += grant.granted_tokens

    def _purge(self, purge: Purge) -> None:
        purged = purge_at_once(self.core, tenant=purge.tenant, salt=purge.salt)
        self.oracle.record_purge(purge.tenant, purge.salt)
        self.oracle.events["blocks purged"] += purged.freed_blocks
        self.oracle.events["blocks purged in use"] += purged.pinned_blocks

    def _close(self, _: Close) -> None:
        self.oracle.is_closed = True
        self.core.close(Draining("stopped"))


class _ReportingDevice(FakeDevice):
    """A device that reports the adapters that are removed from it."""

    def __init__(self, on_remove: Callable[[str], None]) -> None:
        super().__init__()
        self._on_remove = on_remove

    def remove(self, digest: str) -> None:
        self._on_remove(digest)
        super().remove(digest)


def _limits(world: World) -> Limits:
    return Limits.of_pool(
        model="simulated",
        device="cpu",
        vocab_size=2**31,
        max_model_tokens=None,
        num_blocks=world.num_blocks,
        block_size=world.block_size,
        ceiling_blocks={},
    )


def _make_cache(world: World, clock: FakeClock, watch: WatchedCache) -> PrefixCache:
    return PrefixCache(
        world.num_blocks,
        world.block_size,
        policy=make_policy(world.policy, world.num_blocks),
        quotas=dict(world.quotas),
        max_retained_blocks=world.max_retained_blocks,
        max_public_blocks=world.max_public_blocks,
        max_held_blocks=2 * world.num_blocks if world.max_held_blocks is None else world.max_held_blocks,
        max_evicted_prefixes=16,
        listeners=[watch.feed],
        clock=clock,
    )


def _closing_step(event: Event) -> int | None:
    """Return the number of steps after which an event closes the engine; None if it does not, or at a time."""
    return event.step if isinstance(event, Close) else None
