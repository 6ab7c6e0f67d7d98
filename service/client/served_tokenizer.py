"""The tokenizer of the served model, which a client loads when it gets the first prompt that is text."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from radixkv.service.client.tokenizer_files import ArchiveReader, kept
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.service.token_ids import TokenIds
from radixkv.v1.model_pb2 import GetTokenizerRequest
from radixkv.v1.model_pb2_grpc import ModelServiceStub


class ServedTokenizer:
    """Loads the tokenizer for a blocking client, and turns text into token ids. Safe to share between threads.

    Args:
        model: the calls of the service.
        stream: makes one with several answers, with a message and a timeout in seconds.
    """

    def __init__(self, model: ModelServiceStub, stream: Callable[..., Any]) -> None:
        self._model = model
        self._stream = stream
        self._lock = threading.Lock()
        self._loaded: Tokenizer | None = None
        self._digest = ""

    def load(self, timeout_s: float | None = None) -> Tokenizer:
        """Ask the service for its tokenizer's digest, and load the tokenizer unless it is loaded already.

        Raises what `Client.tokenizer` does.
        """
        with self._lock:
            return self._load(timeout_s)

    def get(self, timeout_s: float | None = None) -> Tokenizer:
        """Return the tokenizer. The service is asked for it by the first call alone, for which others wait."""
        with self._lock:
            return self._load(timeout_s) if self._loaded is None else self._loaded

    def token_ids(self, prompt: str | TokenIds, timeout_s: float | None = None) -> TokenIds:
        """Return the token ids of a prompt, which may be token ids already."""
        return self.get(timeout_s).encode(prompt) if isinstance(prompt, str) else prompt

    def _load(self, timeout_s: float | None) -> Tokenizer:
        digest = self._read(timeout_s, digest_only=True).digest
        if self._loaded is None or digest != self._digest:
            directory = kept(digest) or self._read(timeout_s, digest_only=False).keep()
            self._loaded, self._digest = Tokenizer.load(directory), digest
        return self._loaded

    def _read(self, timeout_s: float | None, *, digest_only: bool) -> ArchiveReader:
        reader = ArchiveReader()
        request = GetTokenizerRequest(digest_only=digest_only)
        for chunk in self._stream(self._model.GetTokenizer, request, timeout_s):
            reader.put(chunk)
        return reader


class AsyncServedTokenizer:
    """The same for event loops; see `ServedTokenizer`. Files are read, and text is encoded, on other threads."""

    def __init__(self, model: ModelServiceStub, stream: Callable[..., Any]) -> None:
        self._model = model
        self._stream = stream
        self._lock = asyncio.Lock()
        self._loaded: Tokenizer | None = None
        self._digest = ""

    async def load(self, timeout_s: float | None = None) -> Tokenizer:
        """Load the tokenizer; see `ServedTokenizer.load`."""
        async with self._lock:
            return await self._load(timeout_s)

    async def get(self, timeout_s: float | None = None) -> Tokenizer:
        """Return the tokenizer; see `ServedTokenizer.get`."""
        async with self._lock:
            return await self._load(timeout_s) if self._loaded is None else self._loaded

    async def token_ids(self, prompt: str | TokenIds, timeout_s: float | None = None) -> TokenIds:
        """Return the token ids of a prompt; see `ServedTokenizer.token_ids`."""
        if not isinstance(prompt, str):
            return prompt
        return await asyncio.to_thread((await self.get(timeout_s)).encode, prompt)

    async def _load(self, timeout_s: float | None) -> Tokenizer:
        digest = (await self._read(timeout_s, digest_only=True)).digest
        if self._loaded is None or digest != self._digest:
            directory = await asyncio.to_thread(kept, digest)
            if directory is None:
                directory = await asyncio.to_thread((await self._read(timeout_s, digest_only=False)).keep)
            self._loaded, self._digest = await asyncio.to_thread(Tokenizer.load, directory), digest
        return self._loaded

    async def _read(self, timeout_s: float | None, *, digest_only: bool) -> ArchiveReader:
        reader = ArchiveReader()
        request = GetTokenizerRequest(digest_only=digest_only)
        async for chunk in self._stream(self._model.GetTokenizer, request, timeout_s):
            reader.put(chunk)
        return reader
