"""Lends blocks that long prompts need later to requests that end before."""

from __future__ import annotations

from collections.abc import Collection

from radixkv.errors import CapacityError, QuotaExceeded
from radixkv.scheduling.request import Request

# Tokens of a prompt that a step computes at least, among up to eight tenants in steps of 512: what a turn has.
_TURN_TOKENS = 64


class Lending:
    """Takes blocks of running prompts for a waiting request, if it will be over before they are needed.

        a long prompt   [ computed | what steps can compute until the borrower is over | lent ..... )

    So a prompt as long as the pool lets short requests pass, and loses nothing by it. Each step begins with taking back
    what is free (`Growth`). A borrower gets all blocks that it will ever need, so it takes no more of them. If others
    take its turns, so that it is late, and the prompt needs its blocks, the youngest request is paused as ever.

    Args:
        block_size: tokens a block.
        step_tokens: the most tokens that a step computes.
    """

    def __init__(self, block_size: int, step_tokens: int) -> None:
        self._block_size = block_size
        self._step_tokens = step_tokens

    def lenders(self, request: Request, running: Collection[Request], error: CapacityError) -> list[Request]:
        """List the running requests that could lend a waiting one any blocks at all.

        A request that holds its lease afterwards borrows nothing; nor does one that was paused, which would otherwise
        compute again and again what it has to give up.

        Args:
            request: the waiting request.
            running: requests that have blocks.
            error: why there are none for it. If its tenant is at its ceiling, only requests of its tenant can help.
        """
        if request.params.hold_lease or request.is_paused or request.compression is not None:
            return []
        is_own = isinstance(error, QuotaExceeded)
        candidates = [other for other in running if not is_own or other.tenant == request.tenant]
        return [other for other in candidates if self._num_spare_blocks(other, num_steps=2)]

    def lend(self, request: Request, cached_tokens: int, lenders: Collection[Request]) -> bool:
        """Free the blocks that a waiting request needs until its end.

        Args:
            request: the waiting request.
            cached_tokens: tokens that it reuses.
            lenders: running requests that lend them, those first that can spare the most.

        Returns:
            Whether they are free now; if not, nothing has changed.
        """
        num_lacking = self._num_blocks(request.num_expected_tokens) + 1 - cached_tokens // self._block_size
        num_answer_tokens = request.num_expected_tokens - request.num_prompt_tokens
        num_steps = -(-(request.num_tokens - cached_tokens) // _TURN_TOKENS) + num_answer_tokens
        spare = {lender: self._num_spare_blocks(lender, num_steps + 1) for lender in lenders}
        if sum(spare.values()) < num_lacking:
            return False
        for lender in sorted(lenders, key=spare.__getitem__, reverse=True):
            num_lent = min(num_lacking, spare[lender])
            if num_lent:
                lender.open_lease.own.give_up(num_lent)
                num_lacking -= num_lent
        return True

    def num_lent_blocks(self, request: Request) -> int:
        """Count the blocks that a running request has lent and not taken back."""
        own = request.open_lease.own
        return max(0, self._num_blocks(own.num_tokens) - own.block_ids.size)

    def take_back(self, request: Request) -> None:
        """Take the blocks that a running request has lent, as far as there are any, but at least those for a step.

        Raises:
            OutOfBlocks, QuotaExceeded: there are none for the tokens of a step.
        """
        lease = request.open_lease
        own = lease.own
        if not self.num_lent_blocks(request):
            return
        try:
            own.reserve(own.num_tokens)
        except CapacityError:
            num_tokens_after = max(0, lease.num_tokens - request.computed_upto - self._step_tokens)
            own.reserve(own.num_tokens - num_tokens_after)

    def _num_spare_blocks(self, request: Request, num_steps: int) -> int:
        """Count the blocks of a running request that it can't need in the next `num_steps` steps."""
        lease = request.open_lease
        own, end = lease.own, request.computed_upto + num_steps * self._step_tokens
        num_own_tokens = own.num_tokens - max(0, lease.num_tokens - end)  # those that steps may compute
        has_more = own.block_ids.size > self._num_blocks(own.num_tokens)  # for its answer, as it borrowed itself
        if has_more or request.compression is not None:
            return 0
        return max(0, own.block_ids.size - self._num_blocks(num_own_tokens))

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
