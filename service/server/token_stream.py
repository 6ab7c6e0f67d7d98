"""Tokens on their way from the engine's thread to the call that tells them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

from radixkv.api.logprob_table import LogprobTable
from radixkv.api.result import GeneratedTokens, TokenLogprobs, Usage
from radixkv.errors import QueueFull
from radixkv.service.server.intake.account import Account
from radixkv.service.server.intake.answer_bytes import unread_bytes
from radixkv.service.server.intake.shares import Shares
from radixkv.service.server.mailbox import Mailbox


class UnreadTokens:
    """Tokens of an answer that its caller was not told yet.

    Attributes:
        token_ids: the tokens, in order.
        logprobs: one for each; empty unless asked for.
        prompt_logprobs: those that came with the first of the tokens.
        first_usage, last_usage: those that came with the first and the last of them.
        num_bytes: what all takes, as `unread_bytes` counts.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs = LogprobTable()
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        self.first_usage = self.last_usage = Usage(0, 0, 0, 0)
        self.num_bytes = 0

    def add(self, tokens: GeneratedTokens, num_bytes: int) -> None:
        """Add new tokens."""
        if not self.token_ids:
            self.first_usage, self.prompt_logprobs = tokens.usage, tokens.prompt_logprobs
        self.last_usage = tokens.usage
        self.token_ids += tokens.token_ids
        self.logprobs.extend(tokens.logprobs)
        self.num_bytes += num_bytes


class TokenStream:
    """Hands tokens of a call's answers from the engine's thread to the event loop.

        put ─▶ unread ─▶ take ─▶ written into a part of the answer, which is sent ─▶ get: it has left
               └ counted as held for the account ─────────────────────────────────────┘

    When its account holds too much, what is unread is dropped, and the call ends.

    Args:
        mailbox: brings the tokens.
        held: counts the bytes of all calls.
        account: that these are counted for.
        cancel: ends the answers when too much is held.
    """

    def __init__(self, mailbox: Mailbox, held: Shares, account: Account, cancel: Callable[[], object]) -> None:
        self._mailbox = mailbox
        self._held = held
        self._account = account
        self._cancel = cancel
        self._unread: dict[int, UnreadTokens] = {}
        self._news: dict[int, None] = {}  # answers, in the order in which their news came
        self._ended: list[int] = []
        self._refusal: QueueFull | None = None
        self._has_come = asyncio.Event()
        self._unread_bytes = self._leaving_bytes = 0
        self._is_closed = False

    def put(self, index: int, tokens: GeneratedTokens) -> None:
        """Add tokens of an answer. Called on the engine's thread."""
        self._mailbox.post(self._add, index, tokens, True)

    def keep(self, index: int, tokens: GeneratedTokens) -> None:
        """Add tokens of an answer that is told as a whole, if they have log probabilities: the result has all else.

        They are no news. Called on the engine's thread.
        """
        if tokens.logprobs:
            self._mailbox.post(self._add, index, tokens, False)

    def end(self, index: int, _: Future[Any]) -> None:
        """End an answer. It is known, with all tokens. Called on any thread."""
        self._mailbox.post(self._end, index)

    async def get(self) -> tuple[Collection[int], list[int]]:
        """Wait, and return the answers that have news since the last call, and those that ended.

        Answers that ended are not among the others. What was taken before has been sent.

        Raises:
            QueueFull: too much is held for this account.
        """
        self._give_back(self._leaving_bytes)
        self._leaving_bytes = 0
        await self._has_come.wait()
        self._has_come.clear()
        self._require_room()
        news, self._news = self._news, {}
        ended, self._ended = self._ended, []
        for index in ended:
            news.pop(index, None)
        return news, ended

    def unread(self, index: int) -> UnreadTokens:
        """Return what was not taken of an answer, which grows. Raises as `get` does."""
        self._require_room()
        return self._unread.setdefault(index, UnreadTokens())

    def take(self, index: int) -> UnreadTokens:
        """Take what was not taken of an answer, to be sent before the next `get`, and no news any more.

        Raises:
            QueueFull: too much is held for this account.
        """
        self._require_room()
        taken = self._unread.pop(index, None) or UnreadTokens()
        self._news.pop(index, None)
        self._unread_bytes -= taken.num_bytes
        self._leaving_bytes += taken.num_bytes
        return taken

    def close(self) -> None:
        """Forget everything, also what is still to come."""
        self._is_closed = True
        self._drop_unread()
        self._give_back(self._leaving_bytes)
        self._leaving_bytes = 0

    def _add(self, index: int, tokens: GeneratedTokens, is_news: bool) -> None:
        if self._refusal is not None or self._is_closed:
            return
        num_logprobs = 1 + len(tokens.logprobs[0].top) if tokens.logprobs else 0
        num_bytes = unread_bytes(len(tokens.token_ids), num_logprobs)
        try:
            self._held.take(self._account, num_bytes)
        except QueueFull as error:
            self._refusal = error
            self._has_come.set()
            self._drop_unread()
            self._cancel()
            return
        self._unread_bytes += num_bytes
        self._unread.setdefault(index, UnreadTokens()).add(tokens, num_bytes)
        if is_news:
            self._news[index] = None
            self._has_come.set()

    def _end(self, index: int) -> None:
        self._ended.append(index)
        self._has_come.set()

    def _require_room(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _drop_unread(self) -> None:
        self._give_back(self._unread_bytes)
        self._unread_bytes = 0
        self._unread.clear()

    def _give_back(self, num_bytes: int) -> None:
        if num_bytes:
            self._held.give_back(self._account, num_bytes)
