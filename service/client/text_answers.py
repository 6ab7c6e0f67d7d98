"""Completions of prompts that are text: chunks of text while they are generated, and the whole text."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.service.client.requests import GenerateOptions
from radixkv.service.text.answer_text import AnswerText
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.v1.prefill_pb2 import FinishReason, GenerateResponse, MissReason, Usage


@dataclass(frozen=True, slots=True)
class TextChunk:
    """The next chunk of a completion.

    Attributes:
        text: the new text. It may be empty, or the text of several tokens: incomplete characters are held back, as is
            text that may turn out to be the beginning of a stop string.
        response: the server's response, with the new tokens and, if requested, their log probabilities.
    """

    text: str
    response: GenerateResponse

    @property
    def index(self) -> int:
        """Index of the completion that the chunk belongs to, from 0 to `n - 1`."""
        return self.response.index

    @property
    def token_ids(self) -> Sequence[int]:
        """The new tokens."""
        return self.response.token_ids

    @property
    def usage(self) -> Usage:
        """Token counts, such as `cached_tokens`; set in the first and the last chunk of a completion."""
        return self.response.usage

    @property
    def finished(self) -> bool:
        """Whether this is the last chunk of its completion."""
        return self.response.finished

    @property
    def finish_reason(self) -> str | None:
        """`STOP` or `LENGTH` in the last chunk of a completion; None before."""
        return _enum_name(FinishReason, self.response.finish_reason) if self.finished else None

    @property
    def miss_reason(self) -> str | None:
        """In the last chunk of a completion, the name of the prompt's `MissReason`; None before."""
        return _enum_name(MissReason, self.response.miss_reason) if self.finished else None


class TextAnswer(Iterator[TextChunk]):
    """The completion of a text or a chat. Iterate over it for chunks as they are generated, or `read` it.

        for chunk in client.generate("Once upon a time"):
            print(chunk.text, end="", flush=True)

        client.generate("Once upon a time").read()  # the whole text

    Args:
        responses: the server's responses.
        new_detokenizer: returns a detokenizer for one completion.
    """

    def __init__(self, responses: Generator[GenerateResponse], new_detokenizer: Callable[[], AnswerText]) -> None:
        self._responses = responses
        self._texts = _CompletionTexts(new_detokenizer)

    def __iter__(self) -> Iterator[TextChunk]:
        return self

    def __next__(self) -> TextChunk:
        return self._texts.add(next(self._responses))

    @property
    def text(self) -> str:
        """The text so far; with `n` > 1, the text of the first completion."""
        return self._texts.text_of(0)

    @property
    def texts(self) -> list[str]:
        """The texts so far of all `n` completions."""
        return self._texts.all()

    @property
    def response(self) -> GenerateResponse:
        """The responses of the first completion so far, merged: its tokens, its usage and its finish reason."""
        return self._texts.response

    def read(self) -> str:
        """Wait for the end and return the whole text; with `n` > 1, the text of the first completion, see `texts`.

        Raises:
            ServiceError: the call failed.
        """
        for _ in self:
            pass
        return self.text

    def close(self) -> None:
        """Cancel the call unless it has ended."""
        self._responses.close()


class AsyncTextAnswer(AsyncIterator[TextChunk]):
    """The asyncio version of `TextAnswer`. The prompt is encoded and sent when the completion is first read.

    Args:
        start: encodes the prompt and makes the call; returns the server's responses and a function that returns a
            detokenizer for one completion.
    """

    def __init__(
        self, start: Callable[[], Awaitable[tuple[AsyncGenerator[GenerateResponse], Callable[[], AnswerText]]]]
    ) -> None:
        self._start = start
        self._responses: AsyncGenerator[GenerateResponse] | None = None
        self._texts: _CompletionTexts | None = None
        self._is_closed = False

    def __aiter__(self) -> AsyncIterator[TextChunk]:
        return self

    async def __anext__(self) -> TextChunk:
        if self._is_closed:
            raise StopAsyncIteration
        if self._responses is None or self._texts is None:
            self._responses, new_detokenizer = await self._start()
            self._texts = _CompletionTexts(new_detokenizer)
        return self._texts.add(await anext(self._responses))

    @property
    def text(self) -> str:
        """The text so far; see `TextAnswer.text`."""
        return "" if self._texts is None else self._texts.text_of(0)

    @property
    def texts(self) -> list[str]:
        """The texts so far of all `n` completions."""
        return [] if self._texts is None else self._texts.all()

    @property
    def response(self) -> GenerateResponse:
        """The responses so far, merged; see `TextAnswer.response`."""
        return GenerateResponse() if self._texts is None else self._texts.response

    async def read(self) -> str:
        """Wait for the end and return the whole text; see `TextAnswer.read`."""
        async for _ in self:
            pass
        return self.text

    async def aclose(self) -> None:
        """Cancel the call unless it has ended."""
        self._is_closed = True
        if self._responses is not None:
            await self._responses.aclose()


def detokenizer_factory(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], options: GenerateOptions
) -> Callable[[], AnswerText]:
    """Return a function that returns a detokenizer for one completion.

    Args:
        tokenizer: tokenizer of the served model.
        prompt_ids: token ids of the prompt.
        options: options of the request.
    """
    stops = tuple(options.get("stop") or ())  # an option of None counts as absent, see `make_request`
    min_tokens = options.get("min_tokens") or 0
    return lambda: AnswerText(tokenizer.stream(prompt_ids), stops, min_tokens)


class _CompletionTexts:
    """Turns responses into chunks, and collects their texts.

    Args:
        new_detokenizer: returns a detokenizer for one completion.
    """

    def __init__(self, new_detokenizer: Callable[[], AnswerText]) -> None:
        self.response = GenerateResponse()
        self._new_detokenizer = new_detokenizer
        self._answers: dict[int, AnswerText] = {}
        self._pieces: dict[int, list[str]] = {}

    def add(self, response: GenerateResponse) -> TextChunk:
        """Add the next response."""
        index = response.index
        if index not in self._answers:
            self._answers[index] = self._new_detokenizer()
            self._pieces[index] = []
        answer = self._answers[index]
        text = answer.put(response.token_ids) + (answer.end() if response.finished else "")
        self._pieces[index].append(text)
        if index == 0:
            self.response.MergeFrom(response)  # concatenates the token ids
        return TextChunk(text, response)

    def text_of(self, index: int) -> str:
        """Return the text of a completion so far."""
        return "".join(self._pieces.get(index, ()))

    def all(self) -> list[str]:
        """Return the texts of all completions so far, ordered by index."""
        return [self.text_of(index) for index in range(max(self._pieces, default=-1) + 1)]


def _enum_name(kind: Any, number: int) -> str:
    """Return the name of an enum value, or its number if this client does not know it."""
    return str(kind.Name(number)) if number in kind.values() else str(number)
