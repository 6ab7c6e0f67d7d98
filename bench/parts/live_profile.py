"""Passes requests through the prefix cache and the profiler of misses, which has unlimited time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np

from bench.parts.planted_traffic import AgentRequest
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.doctor.miss_profile import MissReport
from radixkv.doctor.miss_profiler import MAX_BRANCHES, AdmittedPrompt, Branches, MissProfiler
from radixkv.engine.miss_feed import MissFeed
from radixkv.explain.comparison import Decode

_BLOCK_SIZE = 64
_MAX_CAUSES = 100


def live_profile(requests: Sequence[AgentRequest], decode: Decode, *, has_sessions: bool = True) -> MissReport:
    """Return what the profiler of a server finds in requests that arrive one after another.

    Args:
        requests: the requests, in the order in which they arrive.
        decode: returns the text of token ids.
        has_sessions: whether the requests name their sessions.
    """
    profiler = MissProfiler(share=1.0)
    profiler.load_decode = lambda: decode
    feed = MissFeed(profiler)
    # With a partly filled block for the prompt and for the answer of each request, so that nothing is evicted.
    num_blocks = sum((len(request.token_ids) + len(request.answer_ids)) // _BLOCK_SIZE + 2 for request in requests)
    cache = PrefixCache(num_blocks, _BLOCK_SIZE, listeners=[feed])

    def find_branches(segment_numbers: Sequence[int], tenant: str, session_id: str) -> Future[Branches]:
        branches: Future[Branches] = Future()
        branches.set_result(Branches(cache.branches_at(segment_numbers, tenant, session_id, MAX_BRANCHES), None, 0.0))
        return branches

    profiler.start(find_branches)
    try:
        for request in requests:
            profiler.add_step(1.0)
            tokens = np.array(request.token_ids, "<u4").tobytes()
            session_id = request.session if has_sessions else ""
            with cache.lease(request.namespace, tokens, session_id=session_id) as lease:
                reason = cache.explain(request.namespace, tokens, lease.cached_tokens)
                prompt = AdmittedPrompt(request.namespace, session_id, tokens, lease.cached_tokens, reason)
                profiler.add_prompt(prompt)
                _wait_until_idle(profiler)  # the thread of the profiler reads the cache, which is changed below
                lease.commit(lease.num_tokens)
                lease.extend(np.array(request.answer_ids, "<u4").tobytes())
                lease.commit(lease.num_tokens)
            feed.pass_segments()
        _wait_until_idle(profiler)
        return profiler.report(None, _MAX_CAUSES)
    finally:
        profiler.close()


def _wait_until_idle(profiler: MissProfiler) -> None:
    while profiler.is_busy:
        time.sleep(0.0002)
