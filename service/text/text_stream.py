"""Incremental detokenization."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from radixkv.service.text.clean_up import CleanUp
from radixkv.tokens import TOKEN_BYTES

NUM_PROMPT_IDS = 5  # number of last prompt tokens that are decoded with the completion, because they affect its text

BROKEN = "\ufffd"  # replaces bytes that are not valid UTF-8, or not yet
_MAX_PART_BYTES = 3  # of an incomplete character; each of these bytes may be shown as a character of its own
# With byte tokens, an incomplete character and the one before it may be shown as up to 7 replacement characters.
_MAX_BROKEN = 8
_MAX_IDS = 32  # maximum number of tokens that are decoded again with each new one


def last_ids(prompt: bytes) -> list[int]:
    """Return the last token ids of a prompt of little-endian uint32 bytes, as many as a `TextStream` reads."""
    ids: list[int] = np.frombuffer(prompt[-NUM_PROMPT_IDS * TOKEN_BYTES :], dtype="<u4").tolist()
    return ids


class TextStream:
    """Detokenizes token by token, and never returns a part of a character.

    The text of a token depends on its neighbors, so the last few tokens are decoded again with each new one:

        ids    [ last complete text | new, incomplete ]
        text   ..... emitted ......)[ held back: ends in an incomplete character

    Bytes that never become a character are returned as U+FFFD.

    Args:
        decode: returns the text of token ids.
        prompt_ids: the tokens before the completion.
        clean_up: removes spaces from the text; None to keep them.
        shown: texts of the special tokens that are not left out of the text, by their ids.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_ids: Sequence[int] = (),
        clean_up: CleanUp | None = None,
        shown: Mapping[int, str] | None = None,
    ) -> None:
        self._decode = decode
        self._clean_up = clean_up
        self._shown = shown or {}
        self._ids = list(prompt_ids[-NUM_PROMPT_IDS:])
        self._num_old_ids = len(self._ids)  # tokens of the last complete text
        self._num_emitted_chars = len(decode(self._ids).rstrip(BROKEN)) if self._ids else 0

    def put(self, token_id: int) -> str:
        """Add a token, and return the text that is complete; may be empty if a character takes several tokens.

        Complexity: decodes at most `_MAX_IDS + 1` tokens, usually two or three, twice.
        """
        if token_id in self._shown:
            text = self.end() + self._shown[token_id]
            self._ids, self._num_old_ids, self._num_emitted_chars = [token_id], 1, 0
            return text
        new_text = self._put(token_id)
        return new_text if self._clean_up is None else self._clean_up.put(new_text)

    def end(self) -> str:
        """End the text after its last token: return what was held back."""
        text = self._decode(self._ids)[self._num_emitted_chars :]
        self._num_emitted_chars += len(text)
        return text if self._clean_up is None else self._clean_up.put(text) + self._clean_up.end()

    def finish(self, token_ids: Sequence[int]) -> str:
        """Add the last tokens, and return the rest of the text, as `put` for each of them and `end` would return it.

        Complexity: decodes each token once.
        """
        pieces = []
        for token_id in token_ids:
            if token_id in self._shown:
                pieces.append(self.put(token_id))
            else:
                self._ids.append(token_id)
        return "".join((*pieces, self.end()))

    def _put(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        complete_text = text.rstrip(BROKEN)
        is_complete = len(complete_text) == len(text)
        if len(text) - len(complete_text) > _MAX_BROKEN:  # the first ones never become a character
            complete_text = text[:-_MAX_PART_BYTES]
        new_text = complete_text[self._num_emitted_chars :]
        self._num_emitted_chars += len(new_text)

        # Forget tokens that no longer affect the text of further ones.
        if new_text and is_complete:
            del self._ids[: self._num_old_ids]
            self._num_old_ids = len(self._ids)
            self._num_emitted_chars = len(self._decode(self._ids))
        elif len(self._ids) > _MAX_IDS:
            num_held_chars = len(text) - self._num_emitted_chars
            del self._ids[: _MAX_IDS // 2]
            self._num_old_ids = 0
            self._num_emitted_chars = max(0, len(self._decode(self._ids)) - num_held_chars)
        return new_text
