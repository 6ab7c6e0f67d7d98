"""Builds the sequences of each training step: windows of the text, and chats made of neighboring paragraphs."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from bench.training.corpus import Document

STEP_TOKENS = 2048
# Row lengths, in tokens, from which each step chooses one. Lengths that are listed more often are chosen more often.
_ROW_LENGTHS = (256, 256, 256, 256, 512, 512, 1024, 2048)
_CHAT_PERIOD = 4  # of the rows of the shortest length, every fourth one is made of chats
_MAX_TURN_CHARS = 400
_GOLDEN_RATIO = (5**0.5 - 1) / 2
_SYSTEM = "You are a helpful assistant."


@dataclass(frozen=True, slots=True)
class Sequences:
    """Rows of token ids for any step. The same seed gives the same rows.

    Attributes:
        text: all documents, each with an end token, int64 `[num_tokens]`.
        chats: neighboring paragraphs as turns of chats, int64 `[num_chat_tokens]`.
        seed: seed of the lengths and of the position of the first window.
    """

    text: torch.Tensor
    chats: torch.Tensor
    seed: int

    def rows(self, step: int) -> torch.Tensor:
        """Return the rows of a step, int64 `[rows, length + 1]`: `STEP_TOKENS` tokens, and the next token of each row.

        Windows of text begin at multiples of the golden ratio, so that a run of any number of steps reads all parts of
        the text about equally often.
        """
        length = random.Random(f"{self.seed} {step}").choice(_ROW_LENGTHS)
        num_rows = STEP_TOKENS // length
        # Windows are counted in units of the shortest length, so all steps count equally many.
        shortest = min(_ROW_LENGTHS)
        window_numbers = step * (STEP_TOKENS // shortest) + np.arange(num_rows) * (length // shortest)
        shares = (window_numbers * _GOLDEN_RATIO + random.Random(self.seed).random()) % 1.0
        windows = [self._window(self.text, share, length) for share in shares]
        if length == shortest:
            windows[::_CHAT_PERIOD] = [self._window(self.chats, share, length) for share in shares[::_CHAT_PERIOD]]
        return torch.stack(windows)

    @staticmethod
    def _window(ids: torch.Tensor, share: float, length: int) -> torch.Tensor:
        """Return `length` + 1 tokens that begin after this share of the tokens."""
        start = int(share * (ids.numel() - length))
        return ids[start : start + length + 1]


def build_sequences(documents: list[Document], tokenizer: PreTrainedTokenizerBase, seed: int) -> Sequences:
    """Encode documents, and chats made of them, with the model's tokenizer."""
    document_end = tokenizer.pad_token_id
    text = [token for document in documents for token in [*tokenizer.encode(document.text), document_end]]
    generator = random.Random(seed)
    chats = [
        token
        for document in documents
        for chat in _cut_into_chats(document, generator)
        for token in _encode_chat(tokenizer, chat)
    ]
    return Sequences(torch.tensor(text), torch.tensor(chats), seed)


def _cut_into_chats(document: Document, generator: random.Random) -> list[list[str]]:
    """Cut runs of short paragraphs into chats of two to eight turns. Books of verses are left out."""
    if document.source != "austen":
        return []
    chats: list[list[str]] = []
    run: list[str] = []
    for paragraph in [*document.paragraphs, ""]:  # the empty paragraph ends the last run
        if 0 < len(paragraph) <= _MAX_TURN_CHARS and not paragraph.isupper():
            run.append(paragraph)
            continue
        while len(run) >= 2:
            num_turns = 2 * generator.randint(1, 4)
            turns = run[:num_turns]
            num_paired = len(turns) // 2 * 2  # a run may end earlier; then an odd last paragraph is left out
            chats.append(turns[:num_paired])
            run = run[num_turns:]
        run = []
    return chats


def _encode_chat(tokenizer: PreTrainedTokenizerBase, turns: list[str]) -> list[int]:
    """Encode a chat with the chat template. A system prompt precedes a first turn with an odd number of characters."""
    messages = [{"role": "system", "content": _SYSTEM}] if len(turns[0]) % 2 else []
    messages += [{"role": ("user", "assistant")[index % 2], "content": turn} for index, turn in enumerate(turns)]
    ids: list[int] = tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False))
    return ids
