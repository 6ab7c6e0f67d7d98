"""The latest texts of each account, with what they are compiled to."""

from __future__ import annotations

from collections import OrderedDict

from radixkv.service.server.intake.account import Account
from radixkv.service.structured.compilation import Compilation
from radixkv.service.structured.grammar_text import GrammarText


class KeptTexts:
    """Remembers texts, each for the account that wrote it: from how soon an answer comes nobody learns what others ask.

    When there are too many, the account with most of them loses its oldest one that is compiled.

    Args:
        max_texts: of all accounts, beside those that are not compiled yet.
    """

    def __init__(self, max_texts: int) -> None:
        self._max_texts = max_texts
        # The latest last, both accounts and texts.
        self._by_account: OrderedDict[Account, OrderedDict[GrammarText, Compilation]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._by_account.values()))

    def find(self, account: Account, text: GrammarText) -> Compilation | None:
        """Find a text of an account, which is its latest then; None if it is not there."""
        texts = self._by_account.get(account)
        if texts is None or text not in texts:
            return None
        self._by_account.move_to_end(account)
        texts.move_to_end(text)
        return texts[text]

    def add(self, account: Account, compilation: Compilation) -> None:
        """Add the latest text of an account, and forget others if there are too many.

        Complexity: O(texts).
        """
        self._by_account.setdefault(account, OrderedDict())[compilation.text] = compilation
        self._by_account.move_to_end(account)
        while len(self) > self._max_texts and self._forget_one():
            pass

    def _forget_one(self) -> bool:
        """Forget a text. Returns whether there was one that is compiled."""
        holders = [each for each, texts in self._by_account.items() if any(map(_is_over, texts.values()))]
        if not holders:
            return False
        largest = max(holders, key=lambda each: len(self._by_account[each]))
        texts = self._by_account[largest]
        del texts[next(text for text, compilation in texts.items() if compilation.is_over)]
        if not texts:
            del self._by_account[largest]
        return True


def _is_over(compilation: Compilation) -> bool:
    return compilation.is_over
