"""Passes admitted prompts and new segments to the profiler of misses."""

from __future__ import annotations

from radixkv.api.miss_reason import MissReason
from radixkv.cache.changes import Listener
from radixkv.cache.node import NO_NUMBER, Node
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.doctor.miss_profiler import AdmittedPrompt, MissProfiler, is_miss
from radixkv.engine.observer import Observer
from radixkv.namespace import PUBLIC_TENANT
from radixkv.scheduling.request import Outcome, Request
from radixkv.tokens import TOKEN_BYTES


class MissFeed(Observer, Listener):
    """Passes each prompt when it is first admitted, and the tokens of new segments when a request ends.

    Because of this order, a prompt is not compared with its own segments. The engine's thread calls all methods.

    Args:
        profiler: gets the prompts and the tokens.

    Attributes:
        cache: the cache that it listens to; set when the cache has been created.
    """

    def __init__(self, profiler: MissProfiler) -> None:
        self.cache: PrefixCache | None = None
        self._profiler = profiler
        self._new_from: dict[Node, int] = {}  # where the new tokens of a node begin, in bytes from the root

    def request_admitted(self, request: Request) -> None:
        """Pass the prompt of an admitted request, unless it is a prefetch or a public prefix."""
        if request.is_prefetch or request.tenant == PUBLIC_TENANT:
            return
        tokens, reuse = request.prompt_tokens, request.reuse
        is_evicted_by_self = None
        if reuse.miss_reason is MissReason.EVICTED and is_miss(request.num_prompt_tokens, reuse.cached_tokens):
            assert self.cache is not None, "the cache exists before the first request"
            is_evicted_by_self = self.cache.is_evicted_by_self(request.namespace, tokens, reuse.cached_tokens)
        self._profiler.add_prompt(
            AdmittedPrompt(
                request.namespace,
                request.params.session_id,
                tokens,
                reuse.cached_tokens,
                reuse.miss_reason,
                is_evicted_by_self,
            )
        )

    def step_done(self, seconds: float, num_requests: int, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """Report the share of a step's time that was spent on prompts."""
        if num_prefill_tokens:
            self._profiler.add_step(seconds * num_prefill_tokens / (num_prefill_tokens + num_decode_tokens))

    def request_ended(self, request: Request, outcome: Outcome, error: Exception | None, now_s: float) -> None:
        """Pass the new tokens of all segments."""
        self.pass_segments()

    def pass_segments(self) -> None:
        """Pass the new tokens of all segments."""
        new_from, self._new_from = self._new_from, {}
        for node, start in new_from.items():
            self._pass_segment(node, start - node.start_bytes, len(node.tokens))

    def inserted(self, leaf: Node, now_s: float) -> None:
        """Note that all tokens of a leaf are new."""
        self._new_from[leaf] = leaf.start_bytes

    def grown(self, leaf: Node, num_new_blocks: int, now_s: float) -> None:
        """Note that a leaf has new tokens: those of the new blocks, and perhaps some of the block before them."""
        if leaf not in self._new_from:
            num_new_bytes = (num_new_blocks + 1) * leaf.owner.block_size * TOKEN_BYTES
            self._new_from[leaf] = leaf.start_bytes + max(0, len(leaf.tokens) - num_new_bytes)

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """Note that the tokens of the upper half belong to another node now."""
        self.cut(lower)

    def cut(self, lower: Node) -> None:
        """Note that the tokens of the upper half belong to another node, which may be cached longer than `lower`."""
        assert lower.parent is not None
        self._new_from[lower.parent] = lower.parent.start_bytes

    def joined(self, uppers: list[Node], lower: Node) -> None:
        """Pass the tokens of the nodes that no longer exist, which are in `lower` now."""
        for upper in uppers:
            self._new_from.pop(upper, None)
        self._pass_segment(lower, 0, sum(len(each.tokens) for each in uppers))

    def _pass_segment(self, node: Node, start: int, end: int) -> None:
        tenant = node.owner.namespace.tenant
        if node.segment_number != NO_NUMBER and tenant != PUBLIC_TENANT:
            self._profiler.add_segment(tenant, node.tokens[max(0, start) : end], node.segment_number)
