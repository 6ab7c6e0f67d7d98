"""The most recently used grammars of each tenant, with their compilations."""

from __future__ import annotations

from collections import OrderedDict

from radixkv.service.server.receive.fair_shares import QuotaKey
from radixkv.service.structured.compilation import Compilation
from radixkv.service.structured.grammar_text import GrammarText


class GrammarCache:
    """Caches compilations per quota key, so that response times do not reveal the grammars of other tenants.

    When the cache is full, a grammar whose compilation has ended is evicted. Of the quota keys with such a grammar, the
    one with the most grammars, compiled or not, loses the least recently used one whose compilation has ended.

    Args:
        max_texts: maximum number of grammars of all keys together; exceeded only while grammars are not compiled yet.
    """

    def __init__(self, max_texts: int) -> None:
        self._max_texts = max_texts
        # Both the keys and the texts of a key are in the order of their last use, the least recently used first.
        self._by_key: OrderedDict[QuotaKey, OrderedDict[GrammarText, Compilation]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def find(self, key: QuotaKey, text: GrammarText) -> Compilation | None:
        """Return the compilation of a text and mark it as most recently used; None if there is none."""
        texts = self._by_key.get(key)
        if texts is None or text not in texts:
            return None
        self._by_key.move_to_end(key)
        texts.move_to_end(text)
        return texts[text]

    def add(self, key: QuotaKey, compilation: Compilation) -> None:
        """Add a compilation, and evict others if there are too many.

        Complexity: O(texts).
        """
        self._by_key.setdefault(key, OrderedDict())[compilation.text] = compilation
        self._by_key.move_to_end(key)
        while len(self) > self._max_texts and self._evict_one():
            pass

    def _evict_one(self) -> bool:
        """Evict a grammar whose compilation has ended. Returns whether there was one."""
        evictable_keys = [key for key, texts in self._by_key.items() if any(each.is_over for each in texts.values())]
        if not evictable_keys:
            return False
        largest_key = max(evictable_keys, key=lambda each: len(self._by_key[each]))
        texts = self._by_key[largest_key]
        del texts[next(text for text, compilation in texts.items() if compilation.is_over)]
        if not texts:
            del self._by_key[largest_key]
        return True
