"""Lending: lets requests that end early use the blocks that long prompts do not need yet."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from weakref import WeakSet

from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import CapacityError
from radixkv.namespace import PUBLIC_TENANT
from radixkv.scheduling.request import Request

# A prompt gets at least one turn, this many tokens, in each step of 512 tokens that up to eight tenants share.
_TURN_TOKENS = 64
# Maximum number of waiting requests per step for which the blocks of all running requests are inspected.
_MAX_INSPECTIONS = 8


class Lending:
    """Takes blocks of running prompts for a waiting request that will end before the prompts need them.

        a long prompt   [ computed | what steps can compute until the borrower ends | lent ..... )

    Therefore short requests can overtake a prompt as long as the pool. Before each step, `Preemptor` reclaims the lent
    blocks that are free or evictable, and admissions leave as many free or evictable blocks as are lent. A borrower
    gets all blocks that it will ever need. If it ends later than expected because other requests took its turns, and
    the prompt needs its blocks, the youngest request is preempted as usual.

    Lent blocks must be returned. So a request does not borrow if other tenants could not evict its blocks afterwards.
    A request whose tenant has a ceiling does not lend, since other requests of the tenant could use the room below the
    ceiling.

    Args:
        cache: the blocks.
        step_tokens: the maximum number of tokens per step.
    """

    def __init__(self, cache: PrefixCache, step_tokens: int) -> None:
        self._cache = cache
        self._step_tokens = step_tokens
        # Running requests that have lent blocks, and some that have reclaimed all of them.
        self._lenders: WeakSet[Request] = WeakSet()
        self._num_inspections_left = _MAX_INSPECTIONS

    @property
    def num_lent_blocks(self) -> int:
        """Blocks that running requests have lent and not reclaimed."""
        return sum(map(self._num_lent_blocks, self._lenders)) if self._lenders else 0

    def begin_step(self) -> None:
        """Allow the inspections of a new step; see `may_borrow`."""
        self._num_inspections_left = _MAX_INSPECTIONS

    def lend(
        self, request: Request, cached_tokens: int, num_headroom_blocks: int, running: Collection[Request]
    ) -> bool:
        """Free the blocks that a waiting request needs until its end, from prompts that can spare them.

        Args:
            request: the waiting request.
            cached_tokens: tokens that it reuses.
            num_headroom_blocks: blocks that must be free in addition to those of the request.
            running: requests that have blocks. Those that can spare the most lend first.

        Returns:
            Whether the blocks for `max_tokens` are free now. If not, nothing has changed.
        """
        num_lacking = self._num_blocks(self.max_tokens(request)) - cached_tokens // self._cache.block_size
        num_lacking += num_headroom_blocks
        num_answer_tokens = request.num_expected_tokens - request.num_prompt_tokens
        num_turns = -(-(request.num_tokens - cached_tokens) // min(_TURN_TOKENS, self._step_tokens))
        num_steps = num_turns + num_answer_tokens + 1  # a turn or a generated token per step, and one step as a margin
        num_spare = {each: self._num_spare_blocks(each, num_steps) for each in running}
        if sum(num_spare.values()) < num_lacking:
            return False
        for lender in sorted(num_spare, key=num_spare.__getitem__, reverse=True):
            num_lent = min(num_lacking, num_spare[lender])
            if num_lent:
                lender.open_lease.release_last(num_lent)
                self._lenders.add(lender)
                num_lacking -= num_lent
        return True

    def may_borrow(self, request: Request, running: Collection[Request]) -> bool:
        """Whether a waiting request may borrow at all, and any running request has blocks to spare.

        A preempted request may not: it could be preempted and computed again repeatedly.

        Complexity: O(running) for the first eight requests in a step, O(1) for others.
        """
        if not self._num_inspections_left:
            return False
        if request.params.hold_lease or request.is_preempted or request.compression is not None:
            return False
        if request.tenant == PUBLIC_TENANT or self._cache.tenants.quota_of(request.tenant).floor_blocks:
            return False
        self._num_inspections_left -= 1
        return any(self._num_spare_blocks(other, num_steps=2) for other in running)

    def max_tokens(self, request: Request) -> int:
        """Tokens for which a borrower needs blocks, including a block for the copy of its prompt's last block."""
        num_copied_tokens = 0 if request.generation is None else self._cache.block_size
        return request.num_expected_tokens + num_copied_tokens

    def reclaim(self, request: Request) -> None:
        """Reclaim as many lent blocks of a running request as are free or evictable, at least those for its next step.

        Raises:
            OutOfBlocks, QuotaExceeded: there are too few for the tokens of a step.
        """
        if request not in self._lenders:
            return
        cache, lease = self._cache, request.open_lease
        num_available_blocks = cache.pool.num_free + cache.num_evictable_blocks
        with suppress(CapacityError):  # other tenants' floors may keep some of them
            lease.reserve(min(lease.num_tokens, (lease.block_ids.size + num_available_blocks) * cache.block_size))
        lease.reserve(min(lease.num_tokens, request.computed_upto + self._step_tokens))
        if not self._num_lent_blocks(request):
            self._lenders.discard(request)

    def reclaim_all(self) -> None:
        """Reclaim as many lent blocks as are free or evictable, for the oldest request first."""
        for lender in sorted(self._lenders, key=lambda request: request.arrival):
            if lender.lease is None:
                self._lenders.discard(lender)
            else:
                self.reclaim(lender)

    def _num_spare_blocks(self, request: Request, num_steps: int) -> int:
        """Return how many blocks a running request can lend: those that it cannot need in `num_steps` more steps."""
        lease = request.open_lease
        end = request.computed_upto + num_steps * self._step_tokens
        if end >= lease.num_tokens or request.compression is not None or request.tenant == PUBLIC_TENANT:
            return 0
        if lease.usage.quota.ceiling_blocks is not None or lease.block_ids.size > self._num_blocks(lease.num_tokens):
            return 0  # its tenant could use the room below the ceiling; or it has borrowed blocks for its generation
        return max(0, lease.block_ids.size - self._num_blocks(end))

    def _num_lent_blocks(self, request: Request) -> int:
        if request.lease is None:
            return 0
        return max(0, self._num_blocks(request.lease.num_tokens) - request.lease.block_ids.size)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._cache.block_size)
