"""Checks every step of a simulated engine, and what is left at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from radixkv.api.result import GeneratedTokens
from radixkv.cache.node import path_to
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.engine.core import EngineCore
from radixkv.engine.observer import Observer
from radixkv.errors import CapacityError, OutOfBlocks, OutOfMemory, QuotaExceeded
from radixkv.namespace import PUBLIC_TENANT
from radixkv.scheduling.request import Outcome, Request
from radixkv.tokens import TOKEN_BYTES
from tests.engine.simulation.answer_oracle import RequestRecord
from tests.engine.simulation.engine_events import World
from tests.engine.simulation.public_oracle import PublicOracle
from tests.engine.simulation.simulated_model import Part, SimulatedRunner, content_of, path_in_tree
from tests.fakes import FakeClock

# The maximum number of steps without an arrival or an end of a request, per token that is still to be computed. Each
# step computes at least one, but a preemption may drop computed tokens: the highest number in 7,000 worlds was 0.64.
_STEPS_PER_TOKEN = 2


class EngineOracle(Observer):
    """Observes everything that happens to an engine, and asserts that it is correct.

    Attributes:
        events: kinds of events, each with its count.
        is_closed: whether the engine was closed.
        public: checks public prefixes.
    """

    core: EngineCore

    def __init__(self, world: World, cache: PrefixCache, runner: SimulatedRunner, clock: FakeClock) -> None:
        self.events: Counter[str] = Counter()
        self.is_closed = False
        opted_out = frozenset(tenant for tenant, quota in world.quotas if not quota.uses_public_prefixes)
        self.public = PublicOracle(cache, world.max_public_blocks, opted_out, self.events)
        self._world = world
        self._cache = cache
        self._runner = runner
        self._clock = clock
        self._records: dict[Request, RequestRecord] = {}
        self._num_waits = 0  # how often the engine has waited for the end of a step of the runner
        # These counts are those when the current `EngineCore.step` began.
        self._waits_before = self._num_preemptions = self._changes_before = 0
        self._was_idle = False
        self._num_changes = 0  # requests that arrived or ended, and other events
        self._steps_without_change = 0
        self._following: set[Request] = set()  # in the last step
        self._preempted: set[RequestRecord] = set()  # requests with computed tokens that have not resumed yet
        self._max_tokens = world.max_step_tokens  # the maximum number of tokens of the next step

    def record_submission(self, record: RequestRecord) -> None:
        self._records[record.request] = record
        self._num_changes += 1

    def record_cancellation(self, record: RequestRecord) -> None:
        record.is_cancelled = record.is_cancelled or not record.future.done()
        self._num_changes += 1

    def record_finish(self, record: RequestRecord) -> None:
        if record.streamed and not record.future.done() and record.num_streamed_at_finish is None:
            record.num_streamed_at_finish = len(record.streamed)
        record.may_end_early = True
        self._num_changes += 1

    def record_purge(self, tenant: str | None, salt: str | None) -> None:
        """Record a purge, and assert that no purged prefix is found."""
        self._num_changes += 1
        for record in self._records.values():
            if record.request.namespace.is_among(tenant, None, salt):
                if record.written_at_purge is None:
                    record.written_at_purge = record.request.written_tokens
                cached_tokens = self._cache.match(record.ask.namespace, record.request.prompt_tokens).cached_tokens
                reuse = self.public.reuse(record.ask.namespace, record.request.prompt_tokens)
                assert cached_tokens == reuse.cached_tokens == reuse.public_tokens, "purged tokens are found"

    def check_chunk(self, record: RequestRecord, chunk: GeneratedTokens) -> None:
        """Check a streamed chunk. Errors are reported at the end of the step: here they would count as the caller's."""
        self._runner.violations += record.add_chunk(chunk)

    def record_step(self, parts: Sequence[Part], broken: Sequence[Part]) -> list[RequestRecord]:
        """Record that a step is computed, whose parts `broken` will fail. Returns the records of its requests."""
        records = []
        for part, record in self._records_of(parts):
            lease = record.request.open_lease
            if not record.num_computed:
                record.reused = lease.cached_tokens, lease.public_tokens
            if record in self._preempted:
                self._preempted.remove(record)
                self.events["preemptions below public prefixes"] += bool(lease.root_prefix.tokens)
            records.append(record)
            record.record_chunk(part.chunk)
            record.must_fail |= any(part is each for each in broken)
        following = set(self.core._flights._waits)
        self.events["follows"] += len(following - self._following)
        self._following = following
        self.events["failed steps"] += len(broken) == len(parts)
        self.events["tokens"] += self._count_tokens(parts)
        self._max_tokens = self._world.max_step_tokens
        return records

    def record_out_of_memory(self, parts: Sequence[Part]) -> None:
        """Record that the device has no memory for a step. The next one must be smaller; a step of one token fails."""
        self.events["steps without memory"] += 1
        num_tokens = self._count_tokens(parts)
        self._max_tokens = max(1, num_tokens // 2)
        if num_tokens == 1:
            for _, record in self._records_of(parts):
                record.must_fail = True

    def _count_tokens(self, parts: Sequence[Part]) -> int:
        """Count the tokens of a step, and check their maximum."""
        num_tokens = sum(part.chunk.num_tokens for part in parts)
        if num_tokens > self._max_tokens:
            self._runner.violations.append("a step has too many tokens")
        return num_tokens

    def _records_of(self, parts: Sequence[Part]) -> Iterator[tuple[Part, RequestRecord]]:
        """Yield each part of a step with the record of its request. A trial step of the engine has no request."""
        by_lease = {request.lease: request for request in self.core._scheduler.running}
        for part in parts:
            if part.lease in by_lease:
                yield part, self._records[by_lease[part.lease]]

    def step_done(self, seconds: float, num_requests: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        self._num_waits += 1

    def step_failed(self, seconds: float, num_requests: int) -> None:
        """Record a failed step, which may have been started ahead, during the step before."""
        self._num_waits += 1

    def request_preempted(self, request: Request) -> None:
        self.events["preemptions"] += 1
        if (record := self._records.get(request)) is not None and record.num_computed:
            self._preempted.add(record)
        if request.lease is not None:
            self._runner.violations.append("a preempted request keeps its blocks")

    def request_ended(self, request: Request, outcome: Outcome, error: Exception | None, now_s: float) -> None:
        """Check that a request that was refused for lack of blocks could not get them.

        The engine only logs exceptions of observers, so a mistake is added to the violations.
        """
        self._num_changes += 1
        if isinstance(error, CapacityError):
            mistake = self._mistake_in_refusal(request, error)
            if mistake:
                self._runner.violations.append(mistake)

    def record_end(self, request: Request) -> None:
        self._records[request].num_ends += 1

    def begin_step(self) -> None:
        self._waits_before = self._num_waits
        self._num_preemptions = self.events["preemptions"]
        self._changes_before = self._num_changes

    def end_step(self) -> None:
        """Check a step."""
        assert not self._runner.violations, self._runner.violations[0]
        self._cache.check()
        self._verify_contents()
        self._verify_requests()
        self._verify_progress()
        for record in self._records.values():
            if record.future.done() and not record.is_judged:
                record.is_judged = True
                self.events += record.judge(self._clock.now_s, is_closed=self.is_closed)
        for tenant, quota in self._world.quotas:
            usage = self._cache.tenants[tenant]
            assert quota.ceiling_blocks is None or (
                usage.num_cached_blocks + usage.num_leased_blocks <= quota.ceiling_blocks
            )

    def _verify_progress(self) -> None:
        """Assert that each step computes, ends or preempts a request, and that a step after a preemption computes."""
        is_same = self._num_changes == self._changes_before
        is_idle = is_same and self._num_waits == self._waits_before
        if self.core.has_work and is_idle:
            assert self.events["preemptions"] > self._num_preemptions, "a step did nothing, although there is work"
            assert not self._was_idle, "two steps in a row did nothing, although there is work"
        self._was_idle = is_idle
        self._steps_without_change = self._steps_without_change + 1 if is_same and self.core.has_work else 0
        num_remaining_tokens = sum(
            record.request.num_tokens + record.ask.max_new_tokens
            for record in self._records.values()
            if not record.request.is_over
        )
        assert self._steps_without_change <= 4 + _STEPS_PER_TOKEN * num_remaining_tokens, "no request makes progress"

    def _verify_contents(self) -> None:
        """Check that the blocks of the trees and of held leases have the right contents."""
        for tree in self._cache._trees.values():
            for node in tree.nodes():
                tokens = tree.path_tokens(node)
                namespace = tree.owner.namespace
                assert tokens.startswith(self.public.tokens_of(namespace))
                expected = content_of(namespace, path_in_tree(tokens, self._cache.marks))[-(len(node.tokens) // 4) :]
                stored = self._runner.read(np.frombuffer(node.block_ids, dtype=np.int32), expected.size)
                assert np.array_equal(stored, expected), "a published block holds another prefix's K/V"
        for record in self._records.values():
            if record.held is not None and record.held.lease_id not in self.core.held_leases._held:
                record.held = None
            if record.held is not None:
                expected = content_of(record.ask.namespace, record.ask.path)
                stored = self._runner.read(record.held.block_table, expected.size)
                assert np.array_equal(stored, expected), "a held block was written"
                lease = self.core.held_leases._held[record.held.lease_id].lease
                self._runner.verify_writers(record.held.block_table, expected.size, lease.namespace)
                self.events["leases held below public prefixes"] += bool(lease.namespace.public_prefix)

    def _verify_requests(self) -> None:
        """Check that exactly the running requests have leases, and that followers wait for tokens being computed."""
        scheduler, flights = self.core._scheduler, self.core._flights
        running = scheduler.running
        assert len(running) <= self._world.max_running_requests
        leases = [request.lease for request in running]
        assert all(lease is not None and not lease.is_closed for lease in leases)
        self.events["blocks lent"] += self.core._preemptor._lending.num_lent_blocks
        held_leases = [held.lease for held in self.core.held_leases._held.values()]
        public = [lease for lease in self._cache.leases if lease.namespace.tenant == PUBLIC_TENANT]
        assert {*leases, *held_leases, *public} == set(self._cache.leases)
        assert all(request.lease is None for request in scheduler.idle_requests())
        unfinished = {request for request in self._records if not request.is_over}
        assert set(scheduler.requests()) == unfinished, "a request is forgotten"
        following = {request for queue in scheduler._queues for request in queue.following}
        assert set(flights._waits) == following, "a request follows without a leader"
        for leader, lead in flights._leads.items():
            assert leader.computed_upto < len(lead.tokens) // 4, "a request leads tokens that are computed"
        for follower, (leader, upto_tokens) in flights._waits.items():
            assert leader in flights._leads
            assert leader in running
            assert leader.computed_upto < upto_tokens, "a request waits for tokens that are computed"
            assert follower in flights._followers[leader]

    def _mistake_in_refusal(self, request: Request, error: CapacityError) -> str:
        """Return why it was wrong to refuse a request for lack of blocks; empty if it was right.

        It is right if held leases, public prefixes and the floors of other tenants leave too few blocks.
        """
        if isinstance(error, OutOfMemory):
            return "" if self._records[request].must_fail else "a request was refused although a smaller step may fit"

        tenant, block_size = request.tenant, self._world.block_size
        root_tokens = 0
        if request.params.read_cache:
            root_tokens = self.public.reuse(request.namespace, request.tokens).root_tokens
        num_blocks = -(-request.num_tokens // block_size) - root_tokens // block_size
        if str(error).startswith("hold_lease: expected at most"):
            bound = self._cache.held.max_blocks
            is_over_half = self._num_held_blocks(tenant) + num_blocks > bound // 2  # the maximum of one tenant
            is_over = self._num_held_blocks(None) + num_blocks > bound
            return "" if is_over_half or is_over else "a lease was not held although there was room"

        # The request would have had to wait if a running request could have released blocks for it.
        running = [other for other in self.core._scheduler.running if not other.is_over]
        if isinstance(error, QuotaExceeded):
            running = [other for other in running if other.tenant == tenant]
        num_public_blocks = sum(-(-each.num_tokens // block_size) for each in self._cache.public if each.lease)
        num_kept_blocks = self._cache.tenants.num_blocks_kept_from(tenant) + num_public_blocks
        fits_later = num_blocks <= self._world.num_blocks - num_kept_blocks
        if running and (isinstance(error, QuotaExceeded) or fits_later):
            return "a request was refused although others would have released blocks"

        # Blocks that the request would share are needed only if no lease pins them already.
        match = self._cache._find_all(request.namespace, request.tokens, request.params.read_cache)[0]
        node, cached_tokens = match.node, match.cached_tokens - match.root_tokens
        num_pinned = sum(part.num_blocks for part in path_to(node) if part.ref_count)
        usage = self._cache.tenants[tenant]
        num_takeable = self._cache._evictor.num_takeable_blocks(tenant, usage)
        if num_blocks - min(num_pinned, cached_tokens // block_size) <= num_takeable:
            return "a request was refused although there are blocks for it"
        return "" if isinstance(error, OutOfBlocks | QuotaExceeded) else f"a request was refused with {error!r}"

    def _num_held_blocks(self, tenant: str | None) -> int:
        """Count the blocks of held leases, and of running requests that will hold theirs, of a tenant or of all (None).

        No block of a running request counts as shared.
        """
        held = [each.lease for each in self.core.held_leases._held.values() if tenant in (None, each.tenant)]
        nodes = {node for lease in held for node in path_to(lease.node)}
        holding_requests = [other for other in self.core._scheduler.running if other.params.hold_lease]
        return (
            sum(node.num_blocks or self._cache.held.num_purged_blocks(node) for node in nodes)
            + sum(lease.block_ids.size for lease in held)
            + sum(
                -(-(lease.num_tokens - len(lease.root_prefix.tokens) // TOKEN_BYTES) // self._world.block_size)
                for lease in (each.open_lease for each in holding_requests if tenant in (None, each.tenant))
            )
        )

    def finish(self) -> None:
        """Assert that every request was answered and that nothing is left."""
        self.end_step()
        core, world = self.core, self._world
        assert not core.has_work
        for record in self._records.values():
            assert record.future.done(), "a request waits forever"
            assert record.num_ends == 1
        flights, queues = core._flights, core._scheduler._queues
        leftovers = [flights._waits, flights._leads, flights._followers, flights._leaders, flights._first_blocks]
        leftovers += [queues.by_tenant, core._cancellations._deadlines, core._cancellations._failed]
        assert [len(each) for each in leftovers] == [0] * len(leftovers)
        assert core._scheduler._blocked is None
        assert len(core.held_leases) == 0
        assert not list(self._cache.public)
        assert self._cache.pool.num_leased == self._cache.num_pinned_blocks == 0
        self._verify_stats()
        if world.computes_once:
            self._verify_computed_once()
        self._cache.purge()
        self._cache.check()
        assert self._cache.pool.num_free == world.num_blocks

    def _verify_stats(self) -> None:
        stats = self.core.stats.stats()
        self.events["steps"] = self._runner.num_steps
        self.events["copies"] = self._runner.num_copies
        self.events["steps ahead"] = self._runner.num_ahead
        self.events["steps prepared in vain"] = self._runner.num_prepared - self._runner.num_ahead
        self.events["evicted blocks"] = stats.load.evicted_blocks
        requests = stats.load.requests
        assert (requests.waiting, requests.running, requests.following, requests.paused) == (0, 0, 0, 0)
        assert requests.finished + requests.failed + requests.cancelled == len(self._records)
        assert requests.finished == self.events["answered"]
        assert requests.pauses == self.events["preemptions"]
        assert stats.tokens.cached == self.events["cached tokens"]
        assert stats.tokens.computed == self.events["computed tokens"]
        assert stats.tokens.recomputed == self.events["recomputed tokens"]

    def _verify_computed_once(self) -> None:
        prefixes = {
            (record.ask.namespace, record.ask.tokens[:end])
            for record in self._records.values()
            for end in range(4, len(record.ask.tokens) + 1, 4)
        }
        num_decoded = sum(len(record.streamed) for record in self._records.values())
        num_recomputed = self._runner.num_tokens - len(prefixes) - num_decoded
        max_lost = self.events["preemptions"] * (self._world.block_size - 1)  # only full blocks were published
        assert 0 <= num_recomputed <= max_lost, "a token was computed twice"
