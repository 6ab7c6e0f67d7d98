"""Text of tokens that come one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from radixkv.service.text.clean_up import CleanUp

NUM_PROMPT_IDS = 5  # tokens of a prompt that decide how an answer begins

_BROKEN = "\ufffd"  # stands for bytes that are no text, or not yet
_LONGEST_PART = 3  # bytes of a character that lacks some: each may show as a sign of its own
# A vocabulary with a token for each byte shows a character that lacks bytes, and the one before it, as up to 7 signs.
_MAX_BROKEN = 8
_MAX_IDS = 32


class TextStream:
    """Turns tokens into text as they come, and never gives a part of a character.

    Only the last tokens are decoded again for each new one, because a token's text depends on its neighbors:

        ids    [ last whole text | new, not yet whole ]
        text   ..... emitted ...)[ held: ends in bytes that lack others

    Bytes that no others can complete are given as U+FFFD.

    Args:
        decode: returns the text of token ids.
        prompt_ids: the tokens before the first one.
        clean_up: changes the text; None for none.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_ids: Sequence[int] = (),
        clean_up: CleanUp | None = None,
    ) -> None:
        self._decode = decode
        self._clean_up = clean_up
        self._ids = list(prompt_ids[-NUM_PROMPT_IDS:])
        self._num_old_ids = len(self._ids)
        self._num_emitted = len(decode(self._ids).rstrip(_BROKEN)) if self._ids else 0

    def put(self, token_id: int) -> str:
        """Take the next token, and return the text that is whole now; often none, where characters take more tokens.

        Complexity: decodes at most `_MAX_IDS` tokens, mostly two or three, twice.
        """
        new_text = self._put(token_id)
        return new_text if self._clean_up is None else self._clean_up.put(new_text)

    def end(self) -> str:
        """Return what is held, after the last token."""
        text = self._decode(self._ids)[self._num_emitted :]
        self._num_emitted += len(text)
        return text if self._clean_up is None else self._clean_up.put(text) + self._clean_up.end()

    def _put(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        whole = text.rstrip(_BROKEN)
        is_whole = len(whole) == len(text)
        if len(text) - len(whole) > _MAX_BROKEN:
            whole = text[:-_LONGEST_PART]
        new_text = whole[self._num_emitted :]
        self._num_emitted += len(new_text)
        if new_text and is_whole:
            del self._ids[: self._num_old_ids]
            self._num_old_ids = len(self._ids)
            self._num_emitted = len(self._decode(self._ids))
        elif len(self._ids) > _MAX_IDS:
            num_held = len(text) - self._num_emitted
            del self._ids[: _MAX_IDS // 2]
            self._num_old_ids = 0
            self._num_emitted = max(0, len(self._decode(self._ids)) - num_held)
        return new_text
