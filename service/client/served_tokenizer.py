"""The tokenizer of the served model, which a client loads for the first prompt that is text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

from radixkv.service.client.tokenizer_files import ArchiveReader, stored_files
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.service.token_ids import TokenIds
from radixkv.v1.model_pb2 import GetTokenizerRequest, TokenizerChunk


class ServedTokenizer:
    """Loads the tokenizer for a blocking client, and encodes text. Safe to share between threads.

    Args:
        fetch: calls `GetTokenizer` with a request and a timeout in seconds; None for the client's default.
    """

    def __init__(self, fetch: Callable[[GetTokenizerRequest, float | None], Iterator[TokenizerChunk]]) -> None:
        self._fetch = fetch
        self._lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._digest = ""

    def load(self) -> Tokenizer:
        """Request the digest of the server's tokenizer, and load the tokenizer unless it is already loaded.

        Raises what `Client.tokenizer` does.
        """
        with self._lock:
            return self._load(None)

    def get(self, timeout_s: float | None = None) -> Tokenizer:
        """Return the tokenizer. The first call loads it, as `load` does; concurrent calls wait for it."""
        with self._lock:
            return self._load(timeout_s) if self._tokenizer is None else self._tokenizer

    def token_ids(self, prompt: str | TokenIds, timeout_s: float | None = None) -> TokenIds:
        """Return the token ids of a prompt, which may be token ids already."""
        return self.get(timeout_s).encode(prompt) if isinstance(prompt, str) else prompt

    def _load(self, timeout_s: float | None) -> Tokenizer:
        digest = self._read_response(timeout_s, digest_only=True).digest
        if self._tokenizer is None or digest != self._digest:
            directory = stored_files(digest) or self._read_response(timeout_s, digest_only=False).store()
            self._tokenizer = Tokenizer.load(directory)
            self._digest = digest
        return self._tokenizer

    def _read_response(self, timeout_s: float | None, *, digest_only: bool) -> ArchiveReader:
        reader = ArchiveReader()
        for chunk in self._fetch(GetTokenizerRequest(digest_only=digest_only), timeout_s):
            reader.add(chunk)
        return reader


class AsyncServedTokenizer:
    """The asyncio version of `ServedTokenizer`. Files are read and text is encoded on worker threads."""

    def __init__(self, fetch: Callable[[GetTokenizerRequest, float | None], AsyncIterator[TokenizerChunk]]) -> None:
        self._fetch = fetch
        self._lock = asyncio.Lock()
        self._tokenizer: Tokenizer | None = None
        self._digest = ""

    async def load(self) -> Tokenizer:
        """Load the tokenizer; see `ServedTokenizer.load`."""
        async with self._lock:
            return await self._load(None)

    async def get(self, timeout_s: float | None = None) -> Tokenizer:
        """Return the tokenizer; see `ServedTokenizer.get`."""
        async with self._lock:
            return await self._load(timeout_s) if self._tokenizer is None else self._tokenizer

    async def token_ids(self, prompt: str | TokenIds, timeout_s: float | None = None) -> TokenIds:
        """Return the token ids of a prompt; see `ServedTokenizer.token_ids`."""
        if not isinstance(prompt, str):
            return prompt
        tokenizer = await self.get(timeout_s)
        return await asyncio.to_thread(tokenizer.encode, prompt)

    async def _load(self, timeout_s: float | None) -> Tokenizer:
        digest = (await self._read_response(timeout_s, digest_only=True)).digest
        if self._tokenizer is None or digest != self._digest:
            directory = await asyncio.to_thread(stored_files, digest) or await self._fetch_files(timeout_s)
            self._tokenizer = await asyncio.to_thread(Tokenizer.load, directory)
            self._digest = digest
        return self._tokenizer

    async def _fetch_files(self, timeout_s: float | None) -> Path:
        reader = await self._read_response(timeout_s, digest_only=False)
        return await asyncio.to_thread(reader.store)

    async def _read_response(self, timeout_s: float | None, *, digest_only: bool) -> ArchiveReader:
        reader = ArchiveReader()
        async for chunk in self._fetch(GetTokenizerRequest(digest_only=digest_only), timeout_s):
            reader.add(chunk)
        return reader
