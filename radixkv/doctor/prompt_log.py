"""The prompts of a log, in order. Their tokens are in a temporary file, so that a log may be larger than memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from radixkv.api.explanation import PromptSegment, segment_at
from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import Retention
from radixkv.explain.realignment import Tokens
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES

SegmentOf = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class ReportedReuse:
    """What a server reported of a prompt when it was computed.

    Attributes:
        cached_tokens: tokens that were reused.
        miss_reason: why the others were not.
    """

    cached_tokens: int
    miss_reason: MissReason


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """One prompt of a log, without its tokens.

    Attributes:
        where: place of the prompt in the log, such as `log.jsonl:3`; empty for a prompt of a server.
        num_tokens: tokens of the prompt.
        namespace: the model, tenant, adapter and salt that it was sent with.
        session: name of the conversation; empty if it is not known.
        time_s: seconds since the start of the log; None if the log has no times.
        segment_of: returns the name of the segment that contains a position; None without segments.
        retention: the requested retention; None if none was requested.
        reported: what a server reported; None if the log does not contain it.
    """

    where: str
    num_tokens: int
    namespace: Namespace
    session: str = ""
    time_s: float | None = None
    segment_of: SegmentOf | None = None
    retention: Retention | None = None
    reported: ReportedReuse | None = None


class TokenStore:
    """Runs of tokens by number, in an unnamed temporary file, which does not outlive the process."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._ranges: list[tuple[int, int]] = []  # start and size in bytes
        self._end = 0

    def __len__(self) -> int:
        return len(self._ranges)

    def add(self, tokens: bytes) -> int:
        """Store a run of tokens, and return its number."""
        self._file.write(tokens)
        self._ranges.append((self._end, len(tokens)))
        self._end += len(tokens)
        return len(self._ranges) - 1

    def __getitem__(self, number: int) -> bytes:
        self._file.flush()
        start, size = self._ranges[number]
        return os.pread(self._file.fileno(), size, start)

    def close(self) -> None:
        """Delete the file."""
        self._file.close()


class PromptLog:
    """The prompts of a log in the order in which they were sent.

    Args:
        tokens_per_unit: how many tokens of a prompt each number of the log represents: 1, or the tokens of a block for
            a trace, which has one number per block.

    Attributes:
        tokens_per_unit: see `Args`.
        prompts: the prompts.
        num_units: number of tokens of all prompts and answers in the log; for a trace, number of ids.
    """

    def __init__(self, tokens_per_unit: int = 1) -> None:
        self.tokens_per_unit = tokens_per_unit
        self.prompts: list[LoggedPrompt] = []
        self.num_units = 0
        self._tokens = TokenStore()
        self._num_prompt_bytes: list[int] = []

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[LoggedPrompt]:
        return iter(self.prompts)

    def add(self, prompt: LoggedPrompt, token_ids: Sequence[int] | Tokens, answer_ids: Sequence[int] = ()) -> None:
        """Add a prompt.

        Args:
            prompt: the prompt without its tokens.
            token_ids: at least one token id in `[0, 2**32)`; for a trace, one number per block id.
            answer_ids: the tokens that were generated after the prompt and cached.
        """
        packed = np.asarray(token_ids, "<u4").tobytes()
        self.prompts.append(prompt)
        self._num_prompt_bytes.append(len(packed))
        self._tokens.add(packed + np.asarray(answer_ids, "<u4").tobytes())
        self.num_units += len(packed) // TOKEN_BYTES + len(answer_ids)

    def tokens(self, index: int) -> tuple[bytes, bytes]:
        """Return the tokens of a prompt, and those of its answer, as little-endian uint32 bytes."""
        prompt_and_answer, num_prompt_bytes = self._tokens[index], self._num_prompt_bytes[index]
        return prompt_and_answer[:num_prompt_bytes], prompt_and_answer[num_prompt_bytes:]

    def close(self) -> None:
        """Delete the tokens."""
        self._tokens.close()

    def __enter__(self) -> PromptLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def segment_lookup(segments: Iterable[PromptSegment]) -> SegmentOf:
    """Return a function that names the segment of a position; see `radixkv.api.explanation.segment_at`."""
    named = tuple(segments)
    return lambda position: segment_at(named, position)
