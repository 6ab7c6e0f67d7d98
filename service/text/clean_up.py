"""Removal of blanks before punctuation: `clean_up_tokenization_spaces` of transformers."""

from __future__ import annotations

# In this order, as transformers replaces them.
_REPLACED = tuple(
    (old, old.replace(" ", "")) for old in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
)
# What begins one of them, but does not complete it, ends in one of these. Only blanks are ever removed, so after any
# other character what follows has no influence on the text before.
_UNDECIDED = " 'nvr"


def cleaned_up(text: str) -> str:
    """Return a text without blanks before punctuation and contractions.

    >>> cleaned_up("He did n't , did he ?")
    "He didn't, did he?"
    """
    for old, new in _REPLACED:
        text = text.replace(old, new)
    return text


class CleanUp:
    """Cleans a text up that comes in pieces. Together the results are what `cleaned_up` makes of the whole text."""

    def __init__(self) -> None:
        self._kept = ""

    def put(self, piece: str) -> str:
        """Take a piece of text, and return the text that no later piece can change."""
        text = self._kept + piece
        cut = len(text.rstrip(_UNDECIDED))
        self._kept = text[cut:]
        return cleaned_up(text[:cut])

    def end(self) -> str:
        """Return the rest, after the last piece."""
        text, self._kept = self._kept, ""
        return cleaned_up(text)
