"""Removes spaces before punctuation, as `clean_up_tokenization_spaces` of transformers does."""

from __future__ import annotations

# In the order in which transformers applies them.
_REPLACEMENTS = tuple(
    (old, old.replace(" ", "")) for old in (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
)
# A text that ends in any other character cannot end in the beginning of a match. Since only spaces are removed, later
# text cannot change what comes before such a character.
_UNDECIDED = " 'nvr"


def clean_up_tokenization(text: str) -> str:
    """Return a text without spaces before punctuation and contractions.

    >>> clean_up_tokenization("He did n't , did he ?")
    "He didn't, did he?"
    """
    for old, new in _REPLACEMENTS:
        text = text.replace(old, new)
    return text


class CleanUp:
    """Incremental `clean_up_tokenization`: the concatenated results equal `clean_up_tokenization` of the whole text."""

    def __init__(self) -> None:
        self._held = ""

    def put(self, piece: str) -> str:
        """Add a piece of text, and return the text that no later piece can change."""
        text = self._held + piece
        cut = len(text.rstrip(_UNDECIDED))
        self._held = text[cut:]
        return clean_up_tokenization(text[:cut])

    def end(self) -> str:
        """End the text after its last piece: return what was held back."""
        text = self._held
        self._held = ""
        return clean_up_tokenization(text)
