"""Text of tokens that come one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

NUM_PROMPT_IDS = 5  # tokens of a prompt that decide how an answer begins

_BROKEN = "\ufffd"  # stands for bytes that are no text, or not yet
_LONGEST_PART = 3  # bytes of a character that lacks some: each may show as a sign of its own
# A vocabulary with a token for each byte shows a character that lacks bytes, and the one before it, as up to 7 signs.
_MOST_BROKEN = 8
_MOST_IDS = 32


class TextStream:
    """Turns tokens into text as they come, and never gives a part of a character.

    Only the last tokens are decoded again for each new one, because a token's text depends on its neighbors:

        ids    [ last whole text | new, not yet whole ]
        text   ..... told ......)[ held: ends in bytes that lack others

    Bytes that no others can complete are given as U+FFFD.

    Args:
        decode: returns the text of token ids.
        prompt_ids: the tokens before the first one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt_ids[-NUM_PROMPT_IDS:])
        self._num_old_ids = len(self._ids)
        self._num_told = len(decode(self._ids).rstrip(_BROKEN)) if self._ids else 0

    def put(self, token_id: int) -> str:
        """Take the next token, and return the text that is whole now; often none, where characters take more tokens.

        Complexity: decodes at most `_MOST_IDS` tokens, mostly two or three, twice.
        """
        self._ids.append(token_id)
        text = self._decode(self._ids)
        whole = text.rstrip(_BROKEN)
        is_whole = len(whole) == len(text)
        if len(text) - len(whole) > _MOST_BROKEN:
            whole = text[:-_LONGEST_PART]
        news = whole[self._num_told :]
        self._num_told += len(news)
        if news and is_whole:
            del self._ids[: self._num_old_ids]
            self._num_old_ids = len(self._ids)
            self._num_told = len(self._decode(self._ids))
        elif len(self._ids) > _MOST_IDS:
            num_held = len(text) - self._num_told
            del self._ids[: _MOST_IDS // 2]
            self._num_old_ids = 0
            self._num_told = max(0, len(self._decode(self._ids)) - num_held)
        return news

    def end(self) -> str:
        """Return what is held, after the last token."""
        text = self._decode(self._ids)[self._num_told :]
        self._num_told += len(text)
        return text
