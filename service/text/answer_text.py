"""Incremental text of one completion, up to a stop string, and the search for stop strings."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.service.text.text_stream import TextStream


class AnswerText:
    """Detokenizes a completion incrementally, and detects stop strings.

    Args:
        stream: a new stream of the tokenizer.
        stops: stop strings, none of them empty.
        min_tokens: stop strings that are completed by one of the first `min_tokens` tokens do not count.

    Attributes:
        num_tokens: number of tokens so far, up to the one that completed a stop string.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.num_tokens = 0
        self._stream = stream
        self._stop = StopText(stops)
        self._has_stops = bool(stops)
        self._min_tokens = min_tokens

    @property
    def matched(self) -> str | None:
        """The stop string that was found; None if there is none so far."""
        return self._stop.matched

    def put(self, token_ids: Sequence[int]) -> str:
        """Add tokens, and return the text that cannot be part of a stop string. Ignores tokens after a stop string."""
        pieces = []
        for token_id in token_ids:
            if self.matched is not None:
                break
            self.num_tokens += 1
            pieces.append(self._stop.put(self._stream.put(token_id), may_end=self.num_tokens > self._min_tokens))
        return "".join(pieces)

    def finish(self, token_ids: Sequence[int]) -> str:
        """Add the last tokens, and return the rest of the text, as `put` and `end` would return it.

        Without stop strings, each token is decoded once.
        """
        if self._has_stops:
            return self.put(token_ids) + self.end()
        self.num_tokens += len(token_ids)
        return self._stream.finish(token_ids)

    def end(self) -> str:
        """End the text after its last token: return what was held back, or nothing if a stop string was found."""
        if self.matched is not None:
            return ""
        return self._stop.put(self._stream.end(), may_end=False) + self._stop.end()


class StopText:
    """Searches a text that arrives in pieces for the first stop string.

    Args:
        stops: stop strings, none of them empty.

    Attributes:
        matched: the stop string that was found; None before.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._max_held = max(map(len, stops), default=1) - 1  # characters that may be the beginning of a stop string
        self._held = ""

    def put(self, piece: str, *, may_end: bool = True) -> str:
        """Add a piece of text, and return the text that precedes the stop string that was found, or any possible one.

        A stop string is found when it ends in this piece. Of several stop strings, the one that begins first is found;
        of those that begin at the same position, the longest.

        Args:
            piece: the next piece. Do not add pieces after a stop string was found.
            may_end: whether stop strings that end in this piece count.
        """
        text = self._held + piece
        match = self._find_first(text) if may_end else None
        if match is not None:
            start, self.matched = match
            self._held = ""
            return text[:start]
        cut = max(0, len(text) - self._max_held)
        self._held = text[cut:]
        return text[:cut]

    def end(self) -> str:
        """End the text after its last piece: return what was held back."""
        held = self._held
        self._held = ""
        return held

    def _find_first(self, text: str) -> tuple[int, str] | None:
        matches = []
        for stop in self._stops:
            # Stop strings that end in the text that was held back already have been searched for.
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                matches.append((start, -len(stop), stop))
        if not matches:
            return None
        start, _, stop = min(matches)
        return start, stop
