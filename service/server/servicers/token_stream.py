"""Passes generated tokens from the engine's thread to the call that streams them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

from radixkv.api.logprob_table import LogprobTable
from radixkv.api.result import GeneratedTokens, TokenLogprobs, Usage
from radixkv.errors import QueueFull
from radixkv.service.server.mailbox import Mailbox
from radixkv.service.server.receive.fair_shares import FairShares, QuotaKey
from radixkv.service.server.receive.response_bytes import unsent_bytes
from radixkv.service.server.servicers.stream_turns import StreamTurns


class UnsentTokens:
    """Tokens of a completion that were not sent yet.

    Attributes:
        token_ids: the tokens, in order.
        logprobs: one entry per token; empty unless requested.
        prompt_logprobs: the log probabilities of the prompt that arrived with the first of these tokens.
        first_usage: the usage that arrived with the first of these tokens.
        last_usage: the usage that arrived with the last of these tokens.
        num_bytes: memory that the tokens and log probabilities take, as `unsent_bytes` counts.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs = LogprobTable()
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        self.first_usage = Usage(0, 0, 0, 0)
        self.last_usage = self.first_usage
        self.num_bytes = 0

    def add(self, tokens: GeneratedTokens, num_bytes: int) -> None:
        """Add new tokens."""
        if not self.token_ids:
            self.first_usage = tokens.usage
            self.prompt_logprobs = tokens.prompt_logprobs
        self.last_usage = tokens.usage
        self.token_ids += tokens.token_ids
        self.logprobs.extend(tokens.logprobs)
        self.num_bytes += num_bytes


class TokenStream:
    """Passes the tokens of a call's completions from the engine's thread to the event loop.

        put ─▶ unsent ─▶ take ─▶ serialized into a response, which gRPC sends ─▶ the next get
               └ their bytes are held by the quota key ───────────────────────────┘

    The caller calls `get` again only after gRPC has sent the response, so `get` releases the bytes. When the quota key
    (the party that the call is charged to) holds too many bytes, unsent tokens are dropped and the call ends.

    Args:
        mailbox: delivers the tokens.
        held_bytes: counts the bytes of all calls.
        key: the quota key that the bytes are charged to.
        cancel: cancels the completions when too much is held.
        turns: lets the streams of the server continue one after another.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        held_bytes: FairShares,
        key: QuotaKey,
        cancel: Callable[[], object],
        turns: StreamTurns,
    ) -> None:
        self._mailbox = mailbox
        self._held_bytes = held_bytes
        self._turns = turns
        self._key = key
        self._cancel: Callable[[], object] | None = cancel
        self._unsent: dict[int, UnsentTokens] = {}
        self._updated: dict[int, None] = {}  # completions, in the order in which their tokens arrived
        self._ended: list[int] = []
        self._refusal: QueueFull | None = None
        self._has_update = asyncio.Event()
        self._unsent_bytes = 0
        self._sending_bytes = 0
        self._is_closed = False

    def put(self, index: int, tokens: GeneratedTokens) -> None:
        """Add tokens of a completion. Called on the engine's thread."""
        self._mailbox.post(self._add, index, tokens, True)

    def keep(self, index: int, tokens: GeneratedTokens) -> None:
        """Add tokens of a completion that is sent as a whole, but only if they have log probabilities.

        The result lacks the log probabilities of these tokens, so they are collected here. They do not make `get`
        return. Called on the engine's thread.
        """
        if tokens.logprobs:
            self._mailbox.post(self._add, index, tokens, False)

    def end(self, index: int, _: Future[Any]) -> None:
        """End a completion whose result is available. Called on any thread."""
        self._mailbox.post(self._end, index)

    async def get(self) -> tuple[Collection[int], list[int]]:
        """Wait for updates and for a turn, and return the completions with new tokens, and those that ended.

        A completion that ended is not among those with new tokens. Call this only after the tokens that were taken have
        been sent.

        Raises:
            QueueFull: too much is held for the quota key.
        """
        self._release(self._sending_bytes)
        self._sending_bytes = 0
        await self._has_update.wait()
        await self._turns.wait(self._key)
        self._has_update.clear()
        self._raise_refusal()
        updated = self._updated
        ended = self._ended
        self._updated = {}
        self._ended = []
        for index in ended:
            updated.pop(index, None)
        return updated, ended

    def unsent(self, index: int) -> UnsentTokens:
        """Return the tokens of a completion that were not taken. Later tokens are added to them. Raises as `get`."""
        self._raise_refusal()
        return self._unsent.setdefault(index, UnsentTokens())

    def take(self, index: int) -> UnsentTokens:
        """Take the unsent tokens of a completion, to be sent before the next `get`.

        Raises:
            QueueFull: too much is held for the quota key.
        """
        self._raise_refusal()
        taken = self._unsent.pop(index, None) or UnsentTokens()
        self._updated.pop(index, None)
        self._unsent_bytes -= taken.num_bytes
        self._sending_bytes += taken.num_bytes
        return taken

    def close(self) -> None:
        """Drop all tokens, including those that arrive later, and the function that cancels the completions."""
        self._is_closed = True
        self._cancel = None  # it refers to the owner of the stream, which would be a reference cycle
        self._drop_unsent()
        self._release(self._sending_bytes)
        self._sending_bytes = 0

    def _add(self, index: int, tokens: GeneratedTokens, is_update: bool) -> None:
        if self._refusal is not None or self._is_closed:
            return
        num_logprobs = 1 + len(tokens.logprobs[0].top) if tokens.logprobs else 0
        num_bytes = unsent_bytes(len(tokens.token_ids), num_logprobs)
        try:
            self._held_bytes.take(self._key, num_bytes)
        except QueueFull as error:
            self._refusal = error
            self._has_update.set()
            self._drop_unsent()
            if self._cancel is not None:
                self._cancel()
            return
        self._unsent_bytes += num_bytes
        self._unsent.setdefault(index, UnsentTokens()).add(tokens, num_bytes)
        if is_update:
            self._updated[index] = None
            self._has_update.set()

    def _end(self, index: int) -> None:
        self._ended.append(index)
        self._has_update.set()

    def _raise_refusal(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _drop_unsent(self) -> None:
        self._release(self._unsent_bytes)
        self._unsent_bytes = 0
        self._unsent.clear()

    def _release(self, num_bytes: int) -> None:
        if num_bytes:
            self._held_bytes.release(self._key, num_bytes)
