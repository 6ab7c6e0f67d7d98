"""Admission of waiting requests: allocates their blocks, unless another request computes the same tokens."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from typing import Protocol

from radixkv.api.miss_reason import MissReason
from radixkv.cache.held_blocks import HeldPath
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import CapacityError, Cause, QuotaExceeded
from radixkv.scheduling.held_leases import HeldLeases
from radixkv.scheduling.lending import Lending
from radixkv.scheduling.request import Request
from radixkv.scheduling.single_flight import SingleFlight


class Admission(enum.Enum):
    """The outcome of an attempt to admit a request."""

    ADMITTED = "the request has its blocks and runs"
    FOLLOWS = "the request waits for tokens that a running request computes or a tier loads; others may overtake it"
    ENDED = "the request was refused"
    NO_ROOM = "the request waits for blocks, and only requests that end with the step may overtake it"
    OVER_QUOTA = "the request waits for blocks of its own tenant; other tenants continue"


class BlockLoads(Protocol):
    """Loads of stored blocks, as far as admission needs them."""

    def begin_again(self, request: Request) -> bool:
        """Start to load stored blocks that a preempted request could reuse. Returns whether it must wait for them."""

    def fill(self, request: Request, lease: Lease) -> int:
        """Copy loaded blocks into the blocks of a lease. Returns the number of tokens whose K/V exist afterwards."""


class Admitter:
    """Allocates the blocks of waiting requests.

    Args:
        cache: grants leases.
        flights: knows which running request computes which tokens.
        held_leases: leases that outlive their request, and occupy blocks.
        lending: frees blocks of long prompts for short requests.
        clock: seconds, monotonic.
        refuse: ends a request for which there is no room.
        on_start: called with each request that got its blocks; not again when it resumes after a preemption.
        loads: loads stored blocks; None without tiers.
    """

    def __init__(
        self,
        cache: PrefixCache,
        flights: SingleFlight,
        held_leases: HeldLeases,
        lending: Lending,
        clock: Callable[[], float],
        refuse: Callable[[Request, CapacityError], None],
        on_start: Callable[[Request], None],
        loads: BlockLoads | None = None,
    ) -> None:
        self._cache = cache
        self._flights = flights
        self._held_leases = held_leases
        self._lending = lending
        self._clock = clock
        self._refuse = refuse
        self._on_start = on_start
        self._loads = loads

    def look_up(self, request: Request) -> tuple[int, int]:
        """Return how many tokens a request could reuse now, and how many nodes were visited. Complexity: one match."""
        if not request.params.read_cache:
            return 0, 0
        match = self._cache.match(request.namespace, request.tokens)
        return match.cached_tokens, match.num_nodes

    def urgent_tokens(self, request: Request) -> int:
        """Return how many tokens a running request must compute until its next token, or until a follower resumes."""
        release = self._flights.next_release(request)
        return request.num_left if release is None else min(request.num_left, release - request.computed_upto)

    def admit(
        self, request: Request, cached_tokens: int | None, running: Collection[Request], *, ends_with_step: bool
    ) -> Admission:
        """Allocate the blocks of a waiting request if there are enough and no other request computes the same tokens.

        Unless the request ends with this step, it leaves as many free or evictable blocks as prompts have lent, and one
        more for each running generation that may grow, so that the next step does not have to preempt the request. If
        there are too few blocks, a request that ends early enough borrows blocks that long prompts need later.

        Args:
            request: the waiting request.
            cached_tokens: the result of `look_up` in this step; None if it was not called.
            running: requests that have blocks.
            ends_with_step: whether the request ends with this step, so that no blocks must be left free.
        """
        params = request.params
        tokens = request.tokens
        if cached_tokens is None:
            cached_tokens = self.look_up(request)[0] if self._flights.has_leaders(request) else 0
        request.found_tokens = cached_tokens
        if params.read_cache:
            if self._cache.state_slots is not None:
                # This includes cached tokens after the last state snapshot: no other request has to compute their K/V.
                request.found_tokens = self._cache.num_found_tokens(request.namespace, tokens)
            if self._flights.follow(request, request.found_tokens, cached_tokens):
                return Admission.FOLLOWS
        num_headroom_blocks = 0
        if running and not ends_with_step:
            num_headroom_blocks = sum(map(_may_grow, running)) + self._lending.num_lent_blocks
        try:
            lease = self._lease(request, tokens, num_headroom_blocks, running)
        except CapacityError as error:
            if error.cause is Cause.HOLD_LEASE:
                return self._end(request, error)
            borrowed_lease = None if isinstance(error, QuotaExceeded) else self._borrow(request, running)
            if borrowed_lease is None:
                return self._wait_or_refuse(request, running, error)
            lease = borrowed_lease
        if self._loads is not None and request.is_preempted and self._loads.begin_again(request):
            lease.close(is_used=False)  # other requests may have the blocks in the meantime
            return Admission.FOLLOWS
        self._start(request, lease, tokens)
        # Other requests do not wait if only a last token is missing: each request computes its own last token.
        is_published = params.read_cache and params.write_cache and not request.is_revoked
        if is_published and request.num_tokens - request.computed_upto > 1:
            self._flights.lead(request)
        return Admission.ADMITTED

    def _lease(self, request: Request, tokens: bytes, num_headroom_blocks: int, running: Collection[Request]) -> Lease:
        """Allocate the blocks of a request: those of its prompt, and private ones if it will need any."""
        num_private_tokens = 0 if request.compression is None else request.num_private_tokens

        def require_held_path(path: HeldPath, num_nodes: int) -> None:
            request.num_nodes = num_nodes
            self._held_leases.require_room(request, path, running)

        lease = self._cache.lease(
            request.namespace,
            tokens,
            read=request.params.read_cache,
            num_headroom_blocks=num_headroom_blocks,
            num_private_blocks=-(-num_private_tokens // self._cache.block_size),
            num_expected_tokens=request.num_expected_tokens,
            is_resumed=request.has_computed,
            session_id=request.params.session_id,
            require_path=require_held_path if request.params.hold_lease else None,
        )
        if num_private_tokens:
            lease.reserve_private(num_private_tokens)
        return lease

    def _borrow(self, request: Request, running: Collection[Request]) -> Lease | None:
        """Borrow all blocks that a request needs until its end, from prompts that need these blocks later.

        Returns:
            The lease; None if no prompt can lend enough blocks.
        """
        if not self._lending.may_borrow(request, running):
            return None
        num_growing = sum(map(_may_grow, running))
        if not self._lending.lend(request, self.look_up(request)[0], num_growing, running):
            return None
        lease = None
        try:
            lease = self._lease(request, request.tokens, num_growing, running)
            lease.reserve(self._lending.max_tokens(request))
        except CapacityError:
            if lease is not None:
                lease.close(is_used=False)
                lease = None
        self._lending.reclaim_all()
        return lease

    def _wait_or_refuse(self, request: Request, running: Collection[Request], error: CapacityError) -> Admission:
        """Let a request wait, or refuse it if it would not fit even after all running requests have ended."""
        if isinstance(error, QuotaExceeded):
            may_wait = any(other.tenant == request.tenant for other in running)
            return Admission.OVER_QUOTA if may_wait else self._end(request, error)
        return Admission.NO_ROOM if running and self._can_fit(request) else self._end(request, error)

    def _start(self, request: Request, lease: Lease, tokens: bytes) -> None:
        """Set a request to continue after the cached and the loaded tokens of its lease."""
        request.lease = lease
        request.num_nodes = lease.num_nodes
        reuse = request.reuse
        if not request.has_computed:
            reuse.loaded_tokens = {}
        cached_tokens = lease.cached_tokens if self._loads is None else self._loads.fill(request, lease)
        is_first_admission = request.times.scheduled_s is None
        if is_first_admission:
            request.times.scheduled_s = self._clock()
        if not request.has_computed:
            reuse.cached_tokens = cached_tokens
            reuse.public_tokens = lease.public_tokens
            reuse.miss_reason = self._explain(request, lease, tokens, cached_tokens)
        else:
            request.recomputed_tokens += max(0, request.computed_upto - cached_tokens)
        request.computed_upto = cached_tokens
        states = self._cache.state_slots
        if states is not None:
            request.state_lease = states.open(
                lease.block_ids, cached_tokens, request.num_prompt_tokens, request.found_tokens
            )
        if is_first_admission:
            self._on_start(request)

    def _explain(self, request: Request, lease: Lease, tokens: bytes, cached_tokens: int) -> MissReason:
        """Return why the tokens after the reused ones have to be computed."""
        if not request.params.read_cache:
            return MissReason.READ_DISABLED
        if cached_tokens < request.reuse.stored_upto:
            return MissReason.NOT_LOADED
        if self._cache.state_slots is None and cached_tokens < lease.found_tokens:
            # Without windowed layers, the match was shortened for lack of blocks.
            return MissReason.NO_WINDOW if self._cache.windows.pools else MissReason.EVICTED
        return self._cache.explain(request.namespace, tokens, cached_tokens, request.former)

    def _end(self, request: Request, error: CapacityError) -> Admission:
        """Refuse a request for which there will be no room, or that may not hold its lease.

        The error contains the time until the next lease expires. If the tenant's own quota is exceeded, only its own
        leases count, so that the expiry of other tenants' leases is not revealed.
        """
        tenant = request.tenant if isinstance(error, QuotaExceeded) else None
        expires_s = self._held_leases.next_expiry_s(tenant)
        if expires_s is not None:
            error.retry_after_s = max(0.0, expires_s - self._clock())
        self._refuse(request, error)
        return Admission.ENDED

    def _can_fit(self, request: Request) -> bool:
        """Whether there will be room when the running requests have ended.

        Other tenants' floors and other public prefixes may keep too many blocks.
        """
        read = request.params.read_cache
        root_tokens = self._cache.num_root_tokens(request.namespace, request.tokens, read=read)
        num_kept_blocks = self._cache.tenants.num_blocks_kept_from(request.tenant) + self._cache.public.num_kept_blocks
        block_size = self._cache.block_size
        num_own_blocks = -(-(request.num_tokens - root_tokens) // block_size)
        num_own_blocks += -(-request.num_private_tokens // block_size)
        return num_own_blocks <= self._cache.pool.num_blocks - num_kept_blocks


def _may_grow(request: Request) -> bool:
    """Whether a running request may need another block. A compressed generation has all its blocks already."""
    return request.generation is not None and request.compression is None
