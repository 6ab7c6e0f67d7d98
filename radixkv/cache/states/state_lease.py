"""The states that one running request reads and leaves."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from radixkv.blocks import BlockIds


class SlotKeeper(Protocol):
    """Hands out the slots of leases. `StateSlots` is the one, and says what everything means."""

    block_size: int
    every_tokens: int
    num_snapshots: int

    def take(self, saved_tokens: int) -> int | None:
        """Carry out `StateSlots.take`."""

    def drop(self, slot: int) -> None:
        """Carry out `StateSlots.drop`."""

    def publish(self, slot: int, block_id: int, saved_tokens: int) -> bool:
        """Carry out `StateSlots.publish`."""
        ...

    def retract(self, slot: int, block_id: int) -> None:
        """Carry out `StateSlots.retract`."""

    def read(self, slot: int) -> None:
        """Carry out `StateSlots.read`."""

    def close(self, lease: StateLease) -> None:
        """Carry out `StateSlots.close`."""


class _Pending(NamedTuple):
    slot: int
    saved_tokens: int


class _Last(NamedTuple):
    """The newest snapshot of an answer, whose block and slot these are."""

    slot: int
    block_id: int


class StateLease:
    """Holds the slot of a running request, and those of snapshots that it has not published yet.

        prompt    [ cached | every_tokens ....)[ every_tokens ....)[ .... )( answer ............
        source             ^ a snapshot of the tree; then its own slot
        writes                                ^                   ^ ^             ^ the newest block end of the answer
                                                  where others left it   the end of the last whole block

    The last token of a prompt is always computed, so a prompt's last snapshot is before its last token.

    Attributes:
        slot: its own slot, which holds its state after each step.
        source: the slot that is read by the first step after the last `advance`, and by no later one; None at the
            beginning of a sequence.
    """

    def __init__(
        self,
        slots: SlotKeeper,
        slot: int,
        source: int | None,
        cached_tokens: int,
        num_prompt_tokens: int,
        found_tokens: int,
    ) -> None:
        self.slot = slot
        self.source = source
        self._slots = slots
        self._computed_upto = self._last_kept = cached_tokens
        self._num_prompt_tokens = num_prompt_tokens
        size = slots.block_size
        whole_tokens = (num_prompt_tokens - 1) // size * size
        self._wanted = {whole_tokens, min(found_tokens // size * size, whole_tokens)}
        self._pending: dict[int, _Pending] = {}  # by position
        self._last_of_answer: _Last | None = None
        self._is_closed = False

    @property
    def computed_upto(self) -> int:
        """Tokens that its state stands for."""
        return self._computed_upto

    @property
    def pending_slots(self) -> list[int]:
        """Slots of snapshots that are not published."""
        return [each.slot for each in self._pending.values()]

    def want(self, position: int) -> bool:
        """Leave a snapshot at the end of a block, because another request will go on there.

        Returns:
            False if no snapshot may be kept at all.
        """
        self._wanted.add(position)
        return self._slots.num_snapshots > 0

    def writes(self, start: int, end: int, *, keeps: bool) -> list[tuple[int, int]]:
        """Take slots for the snapshots of a step that computes the tokens `[start, end)`.

        Args:
            start, end: the tokens.
            keeps: whether the request may publish anything; if not, no snapshot is taken.

        Returns:
            Positions and the slots that keep the states there; the last one is its own.
        """
        positions = self._positions(start, end) if keeps else []
        for position in positions:
            if position not in self._pending:
                saved_tokens = position - self._last_kept
                slot = self._slots.take(saved_tokens)
                if slot is None:
                    continue
                self._pending[position] = _Pending(slot, saved_tokens)
            if position <= self._num_prompt_tokens:
                self._last_kept = position
        kept = [(position, self._pending[position].slot) for position in positions if position in self._pending]
        return [*kept, (end, self.slot)]

    def _positions(self, start: int, end: int) -> list[int]:
        """List the ends of blocks after `start`, up to `end`, where snapshots are wanted."""
        size, every = self._slots.block_size, self._slots.every_tokens
        upto = min(end, self._num_prompt_tokens - 1)
        positions = {*range((start // every + 1) * every, upto + 1, every)}
        positions |= {position for position in (*self._wanted, *self._pending) if start < position <= end}
        newest = end // size * size
        if newest > max(start, self._num_prompt_tokens - 1):
            positions.add(newest)
        return sorted(positions)

    def advance(self, upto: int) -> None:
        """Go on from its own slot: the tokens before `upto` are computed."""
        self._read()
        self.source = self.slot
        self._computed_upto = upto

    def publish(self, block_ids: BlockIds, num_published_blocks: int) -> None:
        """Publish the snapshots at the ends of blocks that a tree holds now.

        Args:
            block_ids: int32, the blocks of the request.
            num_published_blocks: number of blocks at their beginning that the tree holds.
        """
        upto = min(num_published_blocks * self._slots.block_size, self._computed_upto)
        for position in sorted(each for each in self._pending if each <= upto):
            slot, saved_tokens = self._pending.pop(position)
            block_id = int(block_ids[position // self._slots.block_size - 1])
            if self._slots.publish(slot, block_id, saved_tokens) and position >= self._num_prompt_tokens:
                if self._last_of_answer is not None:
                    self._slots.retract(*self._last_of_answer)
                self._last_of_answer = _Last(slot, block_id)

    def close(self) -> None:
        """Give all slots back; published snapshots stay. Closing again does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._read()
        for slot in self.pending_slots:
            self._slots.drop(slot)
        self._pending.clear()
        self._slots.close(self)

    def _read(self) -> None:
        if self.source is not None and self.source != self.slot:
            self._slots.read(self.source)
            self.source = None
