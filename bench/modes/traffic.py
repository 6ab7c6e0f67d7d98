"""Traffic of prompts that begin with one of several documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from radixkv.config import CacheConfig

_SPARE_TOKENS = 128  # of each request, in blocks of 64 tokens that are not full

TRAFFICS = ("documents fit", "a quarter fits", "each once")


class ModeTraffic(NamedTuple):
    """Documents about which questions are asked in turn.

    Attributes:
        name: shown in the table.
        documents: number of documents.
        rounds: questions about each.
        document_tokens, question_tokens, new_tokens: lengths.
        pool_tokens: capacity of the pool.
    """

    name: str
    documents: int
    rounds: int
    document_tokens: int
    question_tokens: int
    new_tokens: int
    pool_tokens: int

    @property
    def pool_holds_request(self) -> bool:
        """Whether the pool can hold one request, and a copy of the block in which its prompt ends."""
        block_size = CacheConfig().block_size
        num_tokens = self.document_tokens + self.question_tokens + self.new_tokens
        return num_tokens <= (self.pool_tokens // block_size - 1) * block_size

    def prompts(self, vocab_size: int, seed: int) -> Iterator[bytes]:
        """Iterate over the prompts, little-endian uint32 bytes: each document once in each round."""
        rng = np.random.default_rng(seed)
        documents = rng.integers(0, vocab_size, (self.documents, self.document_tokens), dtype=np.uint32)
        for _ in range(self.rounds):
            for document in documents:
                question = rng.integers(0, vocab_size, self.question_tokens, dtype=np.uint32)
                yield np.concatenate((document, question)).astype("<u4").tobytes()


def traffics(
    documents: int, rounds: int, document_tokens: int, question_tokens: int, new_tokens: int
) -> list[ModeTraffic]:
    """Return three kinds of traffic: all documents fit the device, a quarter of them fits, and each is used once."""
    lengths = (document_tokens, question_tokens, new_tokens)
    tokens_per_document = document_tokens + rounds * (question_tokens + new_tokens + _SPARE_TOKENS)
    return [
        ModeTraffic(TRAFFICS[0], documents, rounds, *lengths, pool_tokens=documents * tokens_per_document),
        ModeTraffic(TRAFFICS[1], documents, rounds, *lengths, pool_tokens=documents * tokens_per_document // 4),
        ModeTraffic(TRAFFICS[2], documents * rounds, 1, *lengths, pool_tokens=documents * tokens_per_document // 4),
    ]
