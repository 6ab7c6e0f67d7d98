"""Checks whether a text matches a grammar, byte by byte."""

from __future__ import annotations

from radixkv.service.structured.grammar_text import GrammarText

END = 256  # id of the stop token, after one token per byte


def follows(grammar: GrammarText, text: str) -> bool:
    """Return whether a text is a whole completion that follows a grammar."""
    from radixkv.service.structured.matcher import GrammarConstraint
    from radixkv.service.structured.vocabulary import Vocabulary

    names = [*(bytes([byte]) for byte in range(256)), b"</s>"]
    matcher = GrammarConstraint(grammar, Vocabulary.of_names(names, frozenset({END}))).start(frozenset({END}))
    for byte in text.encode():
        if matcher.is_finished or not matcher.allowed()[byte]:
            return False
        matcher.accept(byte)
    return matcher.is_finished or bool(matcher.allowed()[END])
