"""Prompts of HTTP requests: encoded on threads, so that the event loop answers other calls meanwhile."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable
from typing import Any, TypeVar

import orjson

from radixkv.errors import InvalidRequest
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.thread_call import call_on_thread
from radixkv.service.text.answer_format import AnswerFormat
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.service.text.tool_formats import AUTOMATIC

Result = TypeVar("Result")

# Maximum number of small requests, and likewise of large ones, that are processed on threads at the same time.
_MAX_THREADS = 2
# Requests with a body of at most this size count as small. Their bodies are parsed on the event loop, which takes less
# than 1 ms.
_SMALL_BYTES = 65_536
# Fields with which an error message about a prompt may begin, besides the field that contains the prompt.
_OTHER_FIELDS = ("tools: ", "documents: ", "chat_template_kwargs: ")


class PromptEncoder:
    """Parses bodies and encodes prompts. For use on one event loop.

    Args:
        tokenizer: the model's tokenizer.
        tool_format: name of the format of tool calls, see `Tokenizer.answer_format`.
        reasoning_format: name of the format of reasoning, see `Tokenizer.answer_format`.
    """

    def __init__(
        self, tokenizer: ModelTokenizer, tool_format: str = AUTOMATIC, reasoning_format: str = AUTOMATIC
    ) -> None:
        self._tokenizer = tokenizer
        self._formats = tool_format, reasoning_format
        self._answer_format: AnswerFormat | None = None
        self._small_slots = asyncio.Semaphore(_MAX_THREADS)
        self._large_slots = asyncio.Semaphore(_MAX_THREADS)

    async def parse(self, body: bytes) -> dict[str, Any]:
        """Return the JSON object in a body.

        Raises:
            InvalidRequest: the body is not a JSON object.
        """
        is_small = len(body) <= _SMALL_BYTES
        parsed = _parse_json(body) if is_small else await self.run_on_thread(len(body), lambda: _parse_json(body))
        if not isinstance(parsed, dict):
            raise InvalidRequest("body: expected a JSON object, got other JSON")
        return parsed

    async def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, loaded at the first call.

        Raises:
            InvalidRequest: the model has none.
        """
        return await self._tokenizer.require_async("model", "the HTTP API requires")

    async def answer_format(self) -> AnswerFormat:
        """Return how the model writes its answers.

        Raises:
            InvalidRequest: the model has no tokenizer.
        """
        if self._answer_format is None:
            self._answer_format = (await self.tokenizer()).answer_format(*self._formats)
        return self._answer_format

    async def encode(self, num_bytes: int, field: str, encode: Callable[[Tokenizer], Result]) -> Result:
        """Return what `encode` returns for the tokenizer, such as the token ids of a prompt.

        Args:
            num_bytes: size of the body that contains the prompt.
            field: the field that contains the prompt, for error messages.
            encode: encodes the prompt; called on a thread.

        Raises:
            InvalidRequest: the model has no tokenizer, or it cannot encode the prompt.
        """
        tokenizer = await self.tokenizer()
        try:
            return await self.run_on_thread(num_bytes, lambda: encode(tokenizer))
        except (TypeError, ValueError) as error:
            message = str(error)
            raise InvalidRequest(
                message if message.startswith((field, *_OTHER_FIELDS)) else f"{field}: {message}"
            ) from error

    async def run_on_thread(self, num_bytes: int, function: Callable[[], Result]) -> Result:
        """Call a function that processes the content of a body of `num_bytes` on a thread, and return its result.

        If the caller is cancelled, the function still counts until it returns, so that cancelled calls cannot occupy
        more threads.
        """
        slots = self._small_slots if num_bytes <= _SMALL_BYTES else self._large_slots
        await slots.acquire()
        return await call_on_thread(function, slots.release)


def _parse_json(body: bytes) -> Any:
    """Parse the JSON in a body. orjson keeps the GIL seven times shorter than `json` for a list of token ids."""
    try:
        return orjson.loads(body.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError as error:  # its text contains no part of the body
        raise InvalidRequest(f"body: expected JSON, got {len(body)} other bytes: {error}") from None
