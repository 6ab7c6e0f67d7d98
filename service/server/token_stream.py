"""Tokens on their way from the engine's thread to the call that tells them."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

from radixkv.api.result import GeneratedTokens
from radixkv.service.server.mailbox import Mailbox


class TokenStream:
    """Hands tokens of a call's answers from the engine's thread to the event loop."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._news: dict[int, list[GeneratedTokens]] = {}
        self._ended: list[int] = []
        self._has_come = asyncio.Event()

    def put(self, index: int, tokens: GeneratedTokens) -> None:
        """Add tokens of an answer. Called on the engine's thread."""
        self._mailbox.post(self._add, index, tokens)

    def end(self, index: int, _: Future[Any]) -> None:
        """End an answer. It is known, with all tokens that were not read. Called on any thread."""
        self._mailbox.post(self._end, index)

    async def get(self) -> tuple[dict[int, list[GeneratedTokens]], list[int]]:
        """Wait, and return all tokens that came since the last call, by answer, and the answers that ended.

        Tokens of an answer that ended are left out.
        """
        await self._has_come.wait()
        self._has_come.clear()
        news, self._news = self._news, {}
        ended, self._ended = self._ended, []
        for index in ended:
            news.pop(index, None)
        return news, ended

    def _add(self, index: int, tokens: GeneratedTokens) -> None:
        self._news.setdefault(index, []).append(tokens)
        self._has_come.set()

    def _end(self, index: int) -> None:
        self._ended.append(index)
        self._has_come.set()
