"""Incremental search for stop strings."""

from __future__ import annotations

from collections.abc import Sequence


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
