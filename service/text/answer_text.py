"""The text of one answer, up to a string that ends it."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.service.text.stop_text import StopText
from radixkv.service.text.text_stream import TextStream


class AnswerText:
    """Turns the tokens of an answer into text as they come, and says when one of some strings ends it.

    Args:
        stream: a new stream of the tokenizer.
        stops: strings, none of them empty.
        min_tokens: strings that are complete with one of these first tokens do not count.

    Attributes:
        num_tokens: tokens taken so far, the one that completed a string included, and none after it.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.num_tokens = 0
        self._stream = stream
        self._stop = StopText(stops)
        self._min_tokens = min_tokens

    @property
    def matched(self) -> str | None:
        """The string that ended it; None before."""
        return self._stop.matched

    def put(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens, and return the text that no string can begin in any more. Ignores tokens after one."""
        pieces = []
        for token_id in token_ids:
            if self.matched is not None:
                break
            self.num_tokens += 1
            pieces.append(self._stop.put(self._stream.put(token_id), may_end=self.num_tokens > self._min_tokens))
        return "".join(pieces)

    def end(self) -> str:
        """Return what was kept back, after the last token; nothing if a string was found."""
        if self.matched is not None:
            return ""
        return self._stop.put(self._stream.end(), may_end=False) + self._stop.end()
