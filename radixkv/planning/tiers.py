"""Simulated tiers below the cache: the loader, saver and prefetcher of the engine, above stores without any bytes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from xxhash import xxh3_128_digest

from radixkv.api.params import PrefillParams
from radixkv.api.result import PrefillResult
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import ConfigError
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockFormat, BlockKeys
from radixkv.offload.copies import CompleteCopy, Copy, ReadBlocks
from radixkv.offload.index.offload_index import OffloadIndex
from radixkv.offload.index.prompt_blocks import KeyedBlock
from radixkv.offload.index.tier_index import TierIndex
from radixkv.offload.load_or_compute import LoadOrCompute
from radixkv.offload.offload import Offload
from radixkv.offload.prefetch import Prefetcher
from radixkv.offload.tiers.block_object import BlockObject, Wanted, object_bytes
from radixkv.offload.tiers.block_store import Loan, PutOutcome, PutResult
from radixkv.offload.tiers.slot_files import SlotSizes
from radixkv.offload.tiers.tier import LoadedBlock, Miss, Tier
from radixkv.planning.time_model import TimeModel
from radixkv.planning.virtual_clock import VirtualClock
from radixkv.scheduling.request import Request
from radixkv.tokens import TOKEN_BYTES

_UNBOUNDED = 2**62  # blocks, or bytes
_HOST_ALIGNMENT = 64  # as in radixkv/offload/tiers/host.py
_STEP_TOKENS = 2048  # prefills are reported to `LoadOrCompute` in steps of this size
_PAYLOAD = memoryview(b"\0")


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """The capacity of a tier.

    Attributes:
        name: such as `host`.
        capacity_tokens: capacity in tokens; None if unbounded.
    """

    name: str
    capacity_tokens: int | None


@dataclass(frozen=True, slots=True)
class TierUsage:
    """The use of a tier in a simulation.

    Attributes:
        tier: name of the tier.
        capacity_tokens: capacity in tokens; None if unbounded.
        cached_tokens: prompt tokens that were loaded from the tier when their request arrived.
        token_hit_rate: `cached_tokens` divided by all prompt tokens.
        written_blocks: blocks that were written to the tier.
        loaded_blocks: blocks that were loaded from the tier, for requests or ahead of them.
        held_blocks: blocks that the tier holds at the end.
    """

    tier: str
    capacity_tokens: int | None
    cached_tokens: int
    token_hit_rate: float
    written_blocks: int
    loaded_blocks: int
    held_blocks: int


class SimulatedTiers:
    """The tiers of the engine, whose stores hold keys instead of objects, and whose loads end on a virtual clock.

        request ──────────────────▶ Offload: a load starts ── clock ──▶ ready ── lease, fill
        session waits for a tool ─▶ Prefetcher: a load starts, without a request

    Writing takes no time. Without a `TimeModel`, loading takes no time either, and everything that the tiers hold is
    loaded.

    Args:
        tiers: the tiers, the fastest first. Capacities are rounded down to whole blocks.
        block_size: tokens per block.
        clock: the clock of the simulation.
        times: how long loads and prefills take; None for no time.

    Attributes:
        index: a listener of the cache.
        num_prefetched_tokens: tokens that were loaded ahead of their request.
    """

    def __init__(
        self, tiers: Sequence[TierCapacity], block_size: int, clock: VirtualClock, times: TimeModel | None
    ) -> None:
        self._capacities = tiers
        self._block_size = block_size
        self._clock = clock
        self._times = times
        tier_indexes = [TierIndex(tier.name, _num_blocks(tier, block_size)) for tier in tiers]
        self.index = OffloadIndex(tier_indexes, self._key_blocks, block_size)
        self._tiers = [_SimulatedTier(tier.name, block_size, clock, times) for tier in tiers]
        self._load_or_compute = LoadOrCompute(block_size)
        self._loaded_tokens: Counter[str] = Counter()
        self._waiting: dict[Request, Callable[[Request], None]] = {}
        self._arrivals = itertools.count()

    def connect(self, cache: PrefixCache) -> None:
        """Connect the tiers to the cache, which was built with `index` as a listener."""
        block_format = BlockFormat("trace", "", "", "", self._block_size, _PAYLOAD.nbytes, "")
        copier = _SimulatedCopier()
        keys = BlockKeys(block_format)  # only used by purges, which do not occur
        self._offload = Offload(
            cache,
            self.index,
            self._tiers,
            copier,
            _UNBOUNDED,
            keys,
            self._load_or_compute,
            clock=self._clock,
        )
        self._prefetcher = Prefetcher(cache, self._offload, num_running=lambda: 0)

    @property
    def num_prefetched_tokens(self) -> int:
        """Tokens that were loaded before a request asked for them."""
        return self._prefetcher.num_loaded_tokens

    def advance(self, now_s: float) -> None:
        """Advance the clock to `now_s`. Meanwhile, loads end and blocks of sessions are prefetched."""
        while True:
            wait_s = self._prefetcher.seconds_until_due(self._clock.now_s)
            prefetch_s = None if wait_s is None else self._clock.now_s + wait_s
            next_s = min((each for each in (self._clock.next_s, prefetch_s) if each is not None), default=now_s)
            self._clock.advance(min(next_s, now_s))
            self._process()
            if next_s >= now_s:
                return

    def finish(self) -> None:
        """Advance the clock until no request waits."""
        while self._waiting:
            next_s = self._clock.next_s
            assert next_s is not None, "a load ends at some time"
            self.advance(next_s)

    def request(self, params: PrefillParams, namespace: Namespace, on_ready: Callable[[Request], None]) -> None:
        """Start a request.

        Args:
            params: the prompt.
            namespace: the namespace of its tokens.
            on_ready: called when the blocks of the request are loaded; opens the lease and calls `fill`.
        """
        request = Request(params, namespace, Future[PrefillResult](), self._clock.now_s)
        request.set_arrival(next(self._arrivals))
        if self._offload.begin(request):
            self._waiting[request] = on_ready
            self._process()
        else:
            on_ready(request)
            self._process()

    def fill(self, request: Request, lease: Lease) -> int:
        """Pass the loaded blocks of a request to its lease.

        Returns:
            Number of tokens at the beginning of the prompt that are cached now.
        """
        num_tokens = self._offload.fill(request, lease)
        self._loaded_tokens.update(request.reuse.loaded_tokens)
        self._offload.leave(request)
        return num_tokens

    def note_prefill(self, seconds: float, start: int, end: int) -> None:
        """Report how long a prefill took to the choice between loading and computing."""
        for position in range(start, end, _STEP_TOKENS):
            step_end = min(end, position + _STEP_TOKENS)
            step_s = seconds * (step_end - position) / (end - start)
            self._load_or_compute.note_step(step_s, [(position, step_end)])

    def usage(self, num_prompt_tokens: int) -> tuple[TierUsage, ...]:
        """Return the use of each tier."""
        return tuple(
            TierUsage(
                tier.name,
                capacity.capacity_tokens,
                self._loaded_tokens[tier.name],
                self._loaded_tokens[tier.name] / num_prompt_tokens,
                tier.num_written_blocks,
                tier.num_loaded_blocks,
                len(self.index.tiers[tier.name]),
            )
            for capacity, tier in zip(self._capacities, self._tiers, strict=True)
        )

    def _process(self) -> None:
        """Do what the engine does between two steps."""
        self._prefetcher.look_ahead(self._clock.now_s)
        for request in self._prefetcher.take(self._offload.ready()):
            on_ready = self._waiting.pop(request)
            on_ready(request)
        self._offload.copy()
        self._offload.save()

    def _key_blocks(self, namespace: Namespace, tokens: bytes, parent: bytes | None = None) -> Iterator[KeyedBlock]:
        """Yield the keys of the full blocks of a prompt; they leave out the namespace, which is always the same."""
        block_bytes = self._block_size * TOKEN_BYTES
        parent = parent or b""
        for start in range(0, len(tokens) - block_bytes + 1, block_bytes):
            block_tokens = tokens[start : start + block_bytes]
            key = xxh3_128_digest(parent + block_tokens)
            yield KeyedBlock(key, parent, block_tokens, namespace)
            parent = key


class _SimulatedTier(Tier):
    """A tier that holds keys, has no store, and loads one call after the other.

    Attributes:
        num_written_blocks, num_loaded_blocks: see `TierUsage`.
    """

    def __init__(self, name: str, block_size: int, clock: VirtualClock, times: TimeModel | None) -> None:
        # The constructor of `Tier` is not called, since it requires a store.
        self._keys: set[bytes] = set()
        self._block_size = block_size
        self._clock = clock
        self._times = times
        self._last_load_end_s = 0.0  # when the last load that was started ends
        self.name = name
        self.num_written_blocks = 0
        self.num_loaded_blocks = 0
        self.protection_of = lambda tenant: None

    def save(self, objects: Sequence[BlockObject], victims: Sequence[bytes] = ()) -> Future[PutResult | None]:
        """Hold the keys of blocks instead of those of the victims. Takes no time."""
        evicted = tuple(key for key in victims if key in self._keys)
        self._keys.difference_update(evicted)
        are_new = [each.key not in self._keys for each in objects]
        self.num_written_blocks += sum(are_new)
        self._keys.update(each.key for each in objects)
        outcomes = (PutOutcome.STORED if is_new else PutOutcome.ALREADY_THERE for is_new in are_new)
        return _completed_future(PutResult(tuple(outcomes), evicted))

    def load(self, wanted: Sequence[Wanted]) -> Future[list[LoadedBlock | Miss]]:
        """Load blocks. The future is done when the time of the load has passed on the clock."""
        loaded: Future[list[LoadedBlock | Miss]] = Future()
        seconds = 0.0
        if self._times is not None:
            seconds = self._times.load_s(self.name, len(wanted) * self._block_size)
        self._last_load_end_s = max(self._last_load_end_s, self._clock.now_s) + seconds

        def end() -> None:
            if loaded.set_running_or_notify_cancel():
                self.num_loaded_blocks += len(wanted)
                loaded.set_result([LoadedBlock(_PAYLOAD, Loan(_PAYLOAD)) for _ in wanted])

        if seconds:
            self._clock.call_at(self._last_load_end_s, end)
        else:
            end()
        return loaded

    def delete(self, keys: Sequence[bytes]) -> Future[int | None]:
        """Forget keys."""
        num_before = len(self._keys)
        self._keys.difference_update(keys)
        return _completed_future(num_before - len(self._keys))


class _SimulatedCopier:
    """Copies nothing."""

    payload_bytes = _PAYLOAD.nbytes

    def read(self, block_ids: Sequence[int], part_ids: Sequence[int | None] | None = None) -> ReadBlocks:
        """Return a payload for each block."""
        return ReadBlocks([_PAYLOAD] * len(block_ids), CompleteCopy())

    def has_part(self, payload: memoryview) -> bool:
        """Return True, as for a model without windowed layers."""
        return True

    def write(self, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> Copy:
        """Return a copy that is complete."""
        return CompleteCopy()

    write_parts = write


def _completed_future(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def tier_capacity_tokens(name: str, num_bytes: int, token_bytes: int, block_size: int) -> int:
    """Return the capacity of a tier in tokens of whole blocks, if it has slots as `host` and `disk` have.

    A slot contains the key, the tokens and the checksum of the block in addition to its K/V. On `disk`, a slot takes
    whole pages.

    >>> tier_capacity_tokens("host", 16 * 10**9, token_bytes=131_072, block_size=64)
    122048

    Raises:
        ConfigError: no block fits.
    """
    payload_bytes = block_size * token_bytes
    block_bytes = object_bytes(block_size, payload_bytes)
    slot_bytes = -(-block_bytes // _HOST_ALIGNMENT) * _HOST_ALIGNMENT
    if name == "disk":
        slot_bytes = SlotSizes.of(block_bytes, payload_bytes).slot_bytes
    if num_bytes < slot_bytes:
        raise ConfigError(f"tier {name}: expected room for a block, {slot_bytes} bytes, got {num_bytes}")
    return num_bytes // slot_bytes * block_size


def check_tiers(tiers: Sequence[TierCapacity], block_size: int) -> None:
    """Validate tiers before anything is replayed.

    Raises:
        ConfigError: two tiers have the same name, or one is smaller than a block.
    """
    names = [tier.name for tier in tiers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"tier {name}: expected each tier once, got {names.count(name)}")
    for tier in tiers:
        if not _num_blocks(tier, block_size):
            raise ConfigError(
                f"tier {tier.name}: expected room for at least a block of {block_size} tokens, "
                f"got {tier.capacity_tokens} tokens"
            )


def _num_blocks(tier: TierCapacity, block_size: int) -> int:
    return _UNBOUNDED if tier.capacity_tokens is None else tier.capacity_tokens // block_size
