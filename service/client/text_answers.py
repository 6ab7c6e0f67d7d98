"""Answers to prompts that are text: new text as it is generated, and the whole text at the end."""

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
    """The next part of an answer.

    Attributes:
        text: new text. It is often empty or more than one token's: the bytes of a character are held until all of them
            are there, and text that may be the beginning of a stop string until that is decided.
        response: the service's message, with the new tokens and, if asked for, their log probabilities.
    """

    text: str
    response: GenerateResponse

    @property
    def index(self) -> int:
        """Which of `n` answers it belongs to."""
        return self.response.index

    @property
    def token_ids(self) -> Sequence[int]:
        """The new tokens."""
        return self.response.token_ids

    @property
    def usage(self) -> Usage:
        """Counts of tokens, such as `cached_tokens`; in the first and the last chunk of an answer, else all zero."""
        return self.response.usage

    @property
    def finished(self) -> bool:
        """Whether it is the last part of its answer."""
        return self.response.finished

    @property
    def finish_reason(self) -> str | None:
        """`STOP` or `LENGTH` in the last part of an answer; None before."""
        return _name(FinishReason, self.response.finish_reason) if self.finished else None

    @property
    def miss_reason(self) -> str | None:
        """In the last part, the name of a `MissReason`: why no more of the prompt was reused; None before."""
        return _name(MissReason, self.response.miss_reason) if self.finished else None


class TextAnswer(Iterator[TextChunk]):
    """The answer to a text or a chat while it is generated. Iterate over it for the text as it comes, or `read` it.

        for chunk in client.generate("Once upon a time"):
            print(chunk.text, end="", flush=True)

        client.generate("Once upon a time").read()  # the whole text

    Args:
        responses: the service's messages.
        new_text: makes what turns the tokens of one answer into text.
    """

    def __init__(self, responses: Generator[GenerateResponse], new_text: Callable[[], AnswerText]) -> None:
        self._responses = responses
        self._texts = _Texts(new_text)

    def __iter__(self) -> Iterator[TextChunk]:
        return self

    def __next__(self) -> TextChunk:
        return self._texts.put(next(self._responses))

    @property
    def text(self) -> str:
        """The text so far; with `n` > 1, that of the first answer."""
        return self._texts.text_of(0)

    @property
    def texts(self) -> list[str]:
        """The texts so far of all `n` answers."""
        return self._texts.all()

    @property
    def response(self) -> GenerateResponse:
        """The messages of the first answer so far as one: its tokens, its usage, and in the end why it finished."""
        return self._texts.response

    def read(self) -> str:
        """Wait for the rest, and return the whole text; with `n` > 1, that of the first answer, see `texts`.

        Raises:
            ServiceError: as while iterating.
        """
        for _ in self:
            pass
        return self.text

    def close(self) -> None:
        """Cancel the call if it is not over."""
        self._responses.close()


class AsyncTextAnswer(AsyncIterator[TextChunk]):
    """The same for event loops; see `TextAnswer`. The prompt is encoded and sent when the answer is first read.

    Args:
        start: encodes the prompt and makes the call; returns the service's messages, and what makes an `AnswerText`.
    """

    def __init__(
        self, start: Callable[[], Awaitable[tuple[AsyncGenerator[GenerateResponse], Callable[[], AnswerText]]]]
    ) -> None:
        self._start = start
        self._responses: AsyncGenerator[GenerateResponse] | None = None
        self._texts: _Texts | None = None
        self._is_closed = False

    def __aiter__(self) -> AsyncIterator[TextChunk]:
        return self

    async def __anext__(self) -> TextChunk:
        if self._is_closed:
            raise StopAsyncIteration
        if self._responses is None or self._texts is None:
            self._responses, new_text = await self._start()
            self._texts = _Texts(new_text)
        return self._texts.put(await anext(self._responses))

    @property
    def text(self) -> str:
        """The text so far; see `TextAnswer.text`."""
        return "" if self._texts is None else self._texts.text_of(0)

    @property
    def texts(self) -> list[str]:
        """The texts so far of all `n` answers."""
        return [] if self._texts is None else self._texts.all()

    @property
    def response(self) -> GenerateResponse:
        """The messages so far as one; see `TextAnswer.response`."""
        return GenerateResponse() if self._texts is None else self._texts.response

    async def read(self) -> str:
        """Wait for the rest, and return the whole text; see `TextAnswer.read`."""
        async for _ in self:
            pass
        return self.text

    async def aclose(self) -> None:
        """Cancel the call if it is not over."""
        self._is_closed = True
        if self._responses is not None:
            await self._responses.aclose()


def new_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], options: GenerateOptions) -> Callable[[], AnswerText]:
    """Return what makes the text of one answer.

    Args:
        tokenizer: the served model's.
        prompt_ids: the prompt.
        options: `GenerateOptions` of the request.
    """
    stops, min_tokens = tuple(options.get("stop", ())), options.get("min_tokens", 0)
    return lambda: AnswerText(tokenizer.stream(prompt_ids), stops, min_tokens)


class _Texts:
    """Turns messages into chunks, and keeps what came.

    Args:
        new_text: makes what turns the tokens of one answer into text.
    """

    def __init__(self, new_text: Callable[[], AnswerText]) -> None:
        self.response = GenerateResponse()
        self._new_text = new_text
        self._answers: dict[int, AnswerText] = {}
        self._pieces: dict[int, list[str]] = {}

    def put(self, response: GenerateResponse) -> TextChunk:
        """Take the next message."""
        index = response.index
        if index not in self._answers:
            self._answers[index], self._pieces[index] = self._new_text(), []
        answer = self._answers[index]
        text = answer.put(response.token_ids) + (answer.end() if response.finished else "")
        self._pieces[index].append(text)
        if index == 0:
            self.response.MergeFrom(response)  # which joins the tokens
        return TextChunk(text, response)

    def text_of(self, index: int) -> str:
        """Return the text of an answer so far."""
        return "".join(self._pieces.get(index, ()))

    def all(self) -> list[str]:
        """Return the texts of all answers so far, in the order of their indices."""
        return [self.text_of(index) for index in range(max(self._pieces, default=-1) + 1)]


def _name(kind: Any, number: int) -> str:
    """The name of a value; its digits where a newer service sent one that this client does not know."""
    return str(kind.Name(number)) if number in kind.values() else str(number)
