"""Prefix reuse over calls of `model.generate`, for models of transformers.

    from radixkv.integrations.transformers import RadixCache

    radix = RadixCache(model, capacity_tokens=65_536)
    first = radix.generate(**tokenizer(document + question, return_tensors="pt"), max_new_tokens=50)
    second = radix.generate(**tokenizer(document + other_question, return_tensors="pt"), max_new_tokens=50)

Only the part of the second prompt after the document is computed.

Public API: `RadixCache`, `PromptCache`, `ReuseCounts`.
"""

from radixkv.integrations.transformers.prompt_cache import PromptCache
from radixkv.integrations.transformers.radix_cache import RadixCache, ReuseCounts

__all__ = ["PromptCache", "RadixCache", "ReuseCounts"]
