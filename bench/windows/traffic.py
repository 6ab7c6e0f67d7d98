"""Prompts for models with sliding windows: conversations, documents, repeats, and mixes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]

_VOCAB_SIZE = 50_000


class Shape(NamedTuple):
    """The layers of a model, all of which have K/V of the same size.

    Attributes:
        name: a model that has such layers.
        window: tokens that a query of a windowed layer sees.
        num_windowed, num_other: layers with the window, and without one.
    """

    name: str
    window: int
    num_windowed: int
    num_other: int


class Prompt(NamedTuple):
    """One request.

    Attributes:
        tokens: uint32 `[num_tokens]`.
        is_measured: whether its reused tokens are counted.
        is_only_matched: whether it is only looked up, and not computed.
    """

    tokens: Tokens
    is_measured: bool = True
    is_only_matched: bool = False


Prompts = Callable[[int], Iterator[Prompt]]
"""Yields the prompts for a seed."""


class Traffic(NamedTuple):
    """The prompts that one server gets.

    Attributes:
        name: description of the prompts.
        shape: the layers of the model.
        block_size: tokens per block.
        capacity_tokens: tokens that one pool of all layers holds.
        prompts: yields the prompts for a seed.
    """

    name: str
    shape: Shape
    block_size: int
    capacity_tokens: int
    prompts: Prompts


def random_text(*seed: int, size: int) -> Tokens:
    """Return random tokens that depend on the seed only."""
    return np.random.default_rng(seed).integers(0, _VOCAB_SIZE, size, dtype=np.uint32)


class ActiveConversations:
    """Conversations that share a system prompt. Some are active at a time, and each turn may be the last one.

    Args:
        seed: seed of all random choices.
        num_active: number of conversations that are active at a time.
        system_tokens: tokens of the system prompt.
        turn_tokens: mean tokens of a turn.
        num_turns: mean number of turns of a conversation.
    """

    def __init__(self, seed: int, num_active: int, system_tokens: int, turn_tokens: int, num_turns: int) -> None:
        self._random = np.random.default_rng(seed)
        self._seed = seed
        self._system = random_text(seed, 1, size=system_tokens)
        self._turn_tokens = turn_tokens
        self._num_turns = num_turns
        self._num_begun = num_active
        self._active = [(number, self._system) for number in range(num_active)]

    def __next__(self) -> Prompt:
        """Return the next turn of a random active conversation."""
        position = int(self._random.integers(len(self._active)))
        number, previous_tokens = self._active[position]
        size = int(self._random.integers(self._turn_tokens // 2, 3 * self._turn_tokens // 2))
        tokens = np.concatenate((previous_tokens, random_text(self._seed, 2, number, previous_tokens.size, size=size)))
        self._active[position] = number, tokens
        if self._random.random() < 1 / self._num_turns:
            self._num_begun += 1
            self._active[position] = self._num_begun, self._system
        return Prompt(tokens)


class Documents:
    """Questions about documents, about the n-th one 1/n times as often as about the first.

    A prompt consists of the beginning of a document and a question.

    Args:
        seed: seed of all random choices.
        num_texts, size: number of documents, and tokens of each.
        own_tokens: tokens of each question.
        kept_share: the share of a document that is in the prompt; None for a random share each time.
    """

    def __init__(
        self, seed: int, num_texts: int, size: int, own_tokens: int = 0, kept_share: float | None = None
    ) -> None:
        self._random = np.random.default_rng(seed)
        self._seed = seed
        self._weights = 1 / np.arange(1, num_texts + 1)
        self._size = size
        self._own_tokens = own_tokens
        self._kept_share = kept_share
        self._num_sent = 0

    def __next__(self) -> Prompt:
        """Return the next question."""
        self._num_sent += 1
        number = int(self._random.choice(self._weights.size, p=self._weights / self._weights.sum()))
        if self._kept_share is None:
            kept_tokens = int(self._random.integers(1, self._size + 1))
        else:
            kept_tokens = int(self._kept_share * self._size)
        question = random_text(self._seed, 4, self._num_sent, size=self._own_tokens)
        return Prompt(np.concatenate((random_text(self._seed, 3, number, size=self._size)[:kept_tokens], question)))


def conversations(seed: int, num_requests: int, **sizes: int) -> Iterator[Prompt]:
    """Yield turns of `ActiveConversations`."""
    source = ActiveConversations(seed, **sizes)
    return (next(source) for _ in range(num_requests))


def documents(
    seed: int, num_requests: int, num_texts: int, size: int, kept_share: float | None = None
) -> Iterator[Prompt]:
    """Yield questions about `Documents`."""
    source = Documents(seed, num_texts, size, own_tokens=0 if kept_share == 1 else 40, kept_share=kept_share)
    return (next(source) for _ in range(num_requests))


def matched_again(seed: int, num_texts: int, size: int, kept_share: float) -> Iterator[Prompt]:
    """Yield some prompts to compute, and then the first `kept_share` of each to match."""
    for number in range(num_texts):
        yield Prompt(random_text(seed, number, size=size), is_measured=False)
    for number in range(num_texts):
        yield Prompt(random_text(seed, number, size=size)[: int(kept_share * size)], is_only_matched=True)


def in_turn(seed: int, num_rounds: int, num_texts: int, size: int) -> Iterator[Prompt]:
    """Yield the same prompts in the same order, in several rounds."""
    for number in range(num_rounds * num_texts):
        yield Prompt(random_text(seed, number % num_texts, size=size), is_measured=number >= num_texts)


def mix(seed: int, num_requests: int, shares: tuple[int, int, int]) -> Iterator[Prompt]:
    """Yield conversations, documents cut anywhere, and whole documents, in these proportions."""
    random = np.random.default_rng((seed, 9))
    sources = (
        ActiveConversations(seed, num_active=40, system_tokens=1000, turn_tokens=300, num_turns=6),
        Documents(seed + 1, 60, 3000, own_tokens=40),
        Documents(seed + 2, 150, 2000, kept_share=1.0),
    )
    for source in random.choice(3, num_requests, p=np.array(shares) / sum(shares)).tolist():
        yield next(sources[source])


_SMALL = Shape("5 of 6 layers", 64, 5, 1)
_GPT_OSS = Shape("gpt-oss", 128, 1, 1)
_GEMMA_3 = Shape("Gemma 3", 1024, 5, 1)
_GEMMA_3_1B = Shape("Gemma 3 1B", 512, 22, 4)
_HALF = Shape("half the layers", 512, 1, 1)
_MISTRAL = Shape("Mistral", 4096, 1, 0)
_LONG_CHATS = {"num_active": 60, "system_tokens": 1000, "turn_tokens": 300, "num_turns": 6}
_SHORT_CHATS = {"num_active": 250, "system_tokens": 500, "turn_tokens": 150, "num_turns": 4}


def _documents(num_texts: int, size: int, kept_share: float | None = None) -> Prompts:
    return partial(documents, num_requests=600, num_texts=num_texts, size=size, kept_share=kept_share)


def _again(kept_share: float) -> Prompts:
    return partial(matched_again, num_texts=13, size=400, kept_share=kept_share)


TRAFFICS = (
    Traffic("60 long chats", _GPT_OSS, 64, 131_072, partial(conversations, num_requests=1200, **_LONG_CHATS)),
    Traffic("250 short chats", _GPT_OSS, 64, 131_072, partial(conversations, num_requests=1000, **_SHORT_CHATS)),
    Traffic("documents cut anywhere", _SMALL, 16, 8_192, _documents(20, 1_200)),
    Traffic("documents cut in half", _SMALL, 16, 8_192, _documents(20, 1_200, 0.5)),
    Traffic("repeats", _SMALL, 16, 8_192, _documents(20, 1_200, 1.0)),
    Traffic("13 prompts matched again", _SMALL, 16, 2_048, _again(1.0)),
    Traffic("their first halves matched", _SMALL, 16, 2_048, _again(0.5)),
    Traffic("5 prompts in turn", _SMALL, 16, 1_904, partial(in_turn, num_rounds=20, num_texts=5, size=1000)),
    Traffic("documents cut anywhere", _GPT_OSS, 64, 65_536, _documents(100, 3_000)),
    Traffic("repeats", _GPT_OSS, 64, 65_536, _documents(100, 3_000, 1.0)),
    Traffic("documents cut anywhere", _GEMMA_3, 64, 131_072, _documents(60, 8_000)),
    Traffic("short documents cut anywhere", _GEMMA_3, 64, 65_536, _documents(200, 1_500)),
    Traffic("repeats", _GEMMA_3, 64, 131_072, _documents(60, 8_000, 1.0)),
    Traffic("documents cut anywhere", _MISTRAL, 64, 131_072, _documents(60, 8_000)),
    Traffic("repeats", _MISTRAL, 64, 131_072, _documents(60, 8_000, 1.0)),
    *(
        Traffic(
            f"chats, documents, repeats {':'.join(map(str, shares))}",
            shape,
            64,
            65_536,
            partial(mix, num_requests=1000, shares=shares),
        )
        for shape in (_GPT_OSS, _GEMMA_3_1B, _HALF)
        for shares in ((1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 1, 4))
    ),
)
