"""Compression of the K/V of generations, between two steps."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.cache.lease import Lease
from radixkv.compute.kept_entries import KeepRule, KeptEntries
from radixkv.compute.runner import Runner
from radixkv.engine.step import chunk_of
from radixkv.errors import RadixKVError, StepFailed
from radixkv.scheduling.request import Request
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.step_plan import Slice

# H2O starts from the attention of at most this many last queries of the prompt. Using all queries would require
# computing the prompt again.
_H2O_QUERIES = 64

_log = logging.getLogger(__name__)


class Compressor:
    """Moves a generation into private blocks once its prompt is published, and drops K/V entries of these blocks.

        prompt computed, published ─▶ chosen entries copied ─▶ its blocks released ─▶ decode, drop, decode ...

    Args:
        runner: holds the K/V.
        scheduler: holds the running requests.
        fail: fails a request whose K/V can't be compressed.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, fail: Callable[[Request, RadixKVError], None]) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._fail = fail
        self._kept: weakref.WeakKeyDictionary[Request, KeptEntries] = weakref.WeakKeyDictionary()

    def prepare_step(self) -> None:
        """Compress generations that request it, once they have a token, and make room for the next token of each."""
        for request in list(self._scheduler.running):
            if request.compression is None or request.times.prefilled_s is None:
                continue
            try:
                self._make_room(request, request.compression)
            except Exception as error:  # noqa: BLE001 - whatever the device raises, the other requests continue
                _log.exception("the K/V of a generation could not be compressed")
                self._fail(request, StepFailed(f"compression: raised {type(error).__name__}"))

    def watcher_of(self, request: Request) -> KeptEntries | None:
        """Return the object that observes a request's queries to decide which entries to drop; None if none does."""
        kept = self._kept.get(request)
        return kept if kept is not None and kept.watches else None

    def _make_room(self, request: Request, compression: Compression) -> None:
        lease = request.open_lease
        kept = self._kept.get(request)
        if kept is None:
            kept = self._kept[request] = self._compress(request, compression, lease)
        elif kept.num_entries < request.computed_upto - lease.num_dropped_tokens:
            kept.append(request.computed_upto - 1)  # a step has written the entries of this token
        if kept.is_full:
            kept.drop()
            lease.num_dropped_tokens += 1

    def _compress(self, request: Request, compression: Compression, lease: Lease) -> KeptEntries:
        """Copy the kept entries of a prompt to private blocks, and release its shared blocks.

        Usually the prompt has been published already. That of a request that must not read the cache is published here,
        after the copy, since a commit may replace the blocks of the request by equal blocks of other requests.
        """
        params = request.params
        prompt = chunk_of(Slice(request, 0, params.num_tokens))
        kept = KeptEntries.of_prompt(self._runner, rule_of(compression), prompt, lease.private_block_ids)
        if params.write_cache and not params.read_cache and not request.is_revoked:
            request.written_tokens += lease.commit(params.num_tokens)
        lease.leave_shared(params.num_tokens - kept.num_entries)
        return kept


def rule_of(compression: Compression) -> KeepRule:
    """Return the rule by which a compression keeps entries."""
    num_observed = {
        CompressionPolicy.STREAMING_LLM: 0,
        CompressionPolicy.H2O: min(compression.recent, _H2O_QUERIES),
        CompressionPolicy.SNAPKV: compression.recent,
    }[compression.policy]
    return KeepRule(
        num_entries=compression.max_tokens,
        num_sinks=compression.sinks,
        num_recent=compression.recent,
        num_observed=num_observed,
        is_pooled=compression.policy is CompressionPolicy.SNAPKV,
        drops_generated=compression.drops_generated,
    )
