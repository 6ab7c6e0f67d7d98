"""A prompt with its cache key and the adapter that computes it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

from radixkv.api.params import PrefillParams
from radixkv.api.result import GenerateResult, PrefillResult
from radixkv.invocation import Invocation
from radixkv.namespace import Namespace, PromptKey
from radixkv.offload.index.prompt_blocks import FetchedBlocks
from radixkv.scheduling.request import Generation, Request


class KeyedPrompt(NamedTuple):
    """A prompt with its cache key, in which the adapter's name is resolved.

    Attributes:
        namespace: the namespace whose requests may share its cached tokens.
        tokens: the prompt, little-endian uint32 bytes, as the caller sent it.
        former: its keys before its adapter was replaced; they only explain a miss.
        invocation: where an invoked adapter begins; None if `namespace.adapter` computes the whole prompt.
    """

    namespace: Namespace
    tokens: bytes
    former: Sequence[PromptKey] = ()
    invocation: Invocation | None = None

    @property
    def key(self) -> PromptKey:
        """The key of the prompt in the cache."""
        tokens = self.tokens if self.invocation is None else self.invocation.marked(self.tokens)
        return PromptKey(self.namespace, tokens)

    @property
    def adapter(self) -> str:
        """Digest of the adapter that computes it or a part of it; empty for the base model."""
        return self.namespace.adapter if self.invocation is None else self.invocation.digest

    def request(
        self,
        params: PrefillParams,
        future: Future[PrefillResult] | Future[GenerateResult],
        generation: Generation | None = None,
        fetched: FetchedBlocks | None = None,
    ) -> Request:
        """Create the request for this prompt, received now. `params` are the options of the same prompt."""
        now_s = time.monotonic()
        return Request(params, self.namespace, future, now_s, generation, self.former, self.invocation, fetched)
