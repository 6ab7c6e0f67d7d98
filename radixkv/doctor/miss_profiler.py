"""Examines a sample of the misses of a running server, on a thread of its own, in bounded time and memory."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import NamedTuple

import numpy as np

from radixkv.api.explanation import NamedBranch
from radixkv.api.miss_reason import MissReason
from radixkv.doctor.causes import CAUSE_OF_REASON, MissCause, cause_of_namespace
from radixkv.doctor.examination import Earlier, Examiner
from radixkv.doctor.finding import Finding, GroupKey
from radixkv.doctor.miss_profile import MissCounts, MissProfile, MissReport, report_of
from radixkv.doctor.prompt_log import LoggedPrompt
from radixkv.doctor.window_table import WindowTable
from radixkv.errors import RadixKVError
from radixkv.explain.comparison import Decode
from radixkv.explain.realignment import MAX_SPAN_TOKENS, Tokens, num_equal_tokens
from radixkv.invocation import plain
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES

MIN_MISSED_TOKENS = 256
"""A prompt that computes fewer tokens counts as a hit."""

PERIOD_S = 3600.0
"""The report covers the present period and the one before it."""

MAX_BRANCHES = 3
MAX_PLACES = 8
_MAX_TOKENS = 262_144  # of a prompt that are compared
_MAX_WAITING_BYTES = 4 * 2**20
_FIRST_CREDIT_S = 0.1
_MAX_CREDIT_S = 1.0
_TIMEOUT_S = 60.0  # for the engine to look branches up

_log = logging.getLogger(__name__)


class AdmittedPrompt(NamedTuple):
    """A prompt as it was admitted.

    Attributes:
        namespace: the namespace that it reads.
        session_id: its session; empty for none.
        tokens: little-endian uint32 bytes.
        cached_tokens: how many of its tokens are reused.
        miss_reason: why the others are not.
        is_evicted_by_self: if they were evicted, whether that was for the same tenant; None if it is not known.
    """

    namespace: Namespace
    session_id: str
    tokens: bytes
    cached_tokens: int
    miss_reason: MissReason
    is_evicted_by_self: bool | None = None


class Branches(NamedTuple):
    """What the engine knows about the cached prompts that resemble one.

    Attributes:
        branches: cached branches of its tenant, from their beginning on.
        token_s: seconds that recent requests of the tenant took per computed token; None without measurements.
        took_s: CPU seconds of the engine's thread to find them.
    """

    branches: Sequence[NamedBranch]
    token_s: float | None
    took_s: float


FindBranches = Callable[[Sequence[int], str, str], "Future[Branches]"]
"""Looks up the branches through segments, given by their places, of a tenant and one of its sessions."""


class _Segment(NamedTuple):
    tenant: str
    tokens: bytes
    start: int  # in bytes
    end: int
    place: int


class _Forgotten(NamedTuple):
    tenant: str


class MissProfiler:
    """Groups the misses of a server by cause.

        engine's thread     admitted prompts ──┐                   ┌──▶ branches that resemble the prompt
                            new segments ──────┴─▶ queue           │
        profiler's thread               WindowTable ── candidates ─┴─▶ Examiner ─▶ MissProfile

    A prompt is compared with the cached branches of its own tenant that have the same passages, in any namespace. They
    are found by a table of the windows of all segments that were published since the start of the server.

    The thread is given a share of the time of the steps that compute prompts. While it has used that up, misses are
    counted but not examined. All memory is bounded: the table, the queue, the profile, and what is compared at a time.

    Args:
        share: share of the time of steps that the thread may use.
        clock: seconds, monotonic.
        work_clock: CPU seconds of the calling thread.

    Attributes:
        load_decode: loads the tokenizer of the model and returns its `decode`, or raises ValueError; called at most
            once, on the thread. None without a tokenizer.
    """

    def __init__(
        self,
        share: float,
        clock: Callable[[], float] = time.monotonic,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.load_decode: Callable[[], Decode] | None = None
        self._decode: Decode | None = None
        self._share = share
        self._clock = clock
        self._work_clock = work_clock
        self._table = WindowTable()
        self._seed = secrets.randbits(63)
        self._queue: queue.SimpleQueue[AdmittedPrompt | _Segment | _Forgotten | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards all below
        self._credit_s = _FIRST_CREDIT_S
        self._num_waiting_bytes = 0
        self._period_start_s = self._former_start_s = clock()
        self._profiles = [MissProfile(), MissProfile()]  # of the present period and of the one before it
        self._find_branches: FindBranches | None = None
        self._thread = threading.Thread(target=self._run, name="radixkv-misses", daemon=True)

    @property
    def is_busy(self) -> bool:
        """Whether prompts or segments wait, or are being examined."""
        return self._num_waiting_bytes > 0

    def start(self, find_branches: FindBranches) -> None:
        """Start the thread."""
        self._find_branches = find_branches
        self._thread.start()

    def close(self) -> None:
        """End the thread after what it examines now."""
        if self._thread.ident is not None:
            with self._lock:
                self._credit_s = float("-inf")
            self._queue.put(None)
            self._thread.join()

    def add_step(self, seconds: float) -> None:
        """Give the thread its share of the time of a step that computed prompts."""
        with self._lock:
            self._credit_s = min(_MAX_CREDIT_S, self._credit_s + self._share * seconds)

    def add_prompt(self, prompt: AdmittedPrompt) -> None:
        """Count a prompt, and queue it if it is a miss and there is time to examine it. For the engine's thread."""
        num_tokens = len(prompt.tokens) // TOKEN_BYTES
        counts = MissCounts(prompts=1, prompt_tokens=num_tokens, cached_tokens=prompt.cached_tokens)
        num_missed = num_tokens - prompt.cached_tokens
        finding = None
        is_queued = False
        if num_missed >= MIN_MISSED_TOKENS:
            counts.misses, counts.missed_tokens = 1, num_missed
            cause = CAUSE_OF_REASON.get(prompt.miss_reason)
            if cause is MissCause.EVICTED and prompt.is_evicted_by_self is not None:
                cause = MissCause.EVICTED_BY_OWN if prompt.is_evicted_by_self else MissCause.EVICTED_BY_OTHERS
            if cause is not None:
                finding = Finding(GroupKey(cause), prompt.cached_tokens, num_missed - 1, is_bound=True)
                counts.examined_misses, counts.examined_tokens = 1, num_missed
            else:
                is_queued = True
        with self._lock:
            profile = self._present()
            profile.count(prompt.namespace.tenant, counts)
            if finding is not None:
                profile.add(prompt.namespace.tenant, finding, None)
            is_queued = is_queued and self._credit_s > 0 and self._may_wait(len(prompt.tokens))
        if is_queued:
            self._queue.put(prompt)

    def add_segment(self, tenant: str, tokens: bytes, start: int, end: int, place: int) -> None:
        """Queue tokens of a cached segment, to find prompts that have the same ones. For the engine's thread.

        Args:
            tenant: the tenant that published them.
            tokens: those of the segment, little-endian uint32 bytes.
            start, end: the range that is new, in bytes.
            place: place of the segment.
        """
        with self._lock:
            may_wait = self._may_wait(end - start)
        if may_wait:
            self._queue.put(_Segment(tenant, tokens, start, end, place))

    def forget(self, tenant: str) -> None:
        """Forget everything about a tenant, and what of it waits to be examined. For the engine's thread."""
        with self._lock:
            is_known = any(each.knows(tenant) for each in self._profiles)
        if is_known:
            self._queue.put(_Forgotten(tenant))

    def report(self, tenant: str | None, max_groups: int) -> MissReport:
        """Return what is known about the misses of a tenant; of all tenants with None. For any thread."""
        with self._lock:
            self._present()
            covered_s = self._clock() - self._former_start_s
            return report_of(self._profiles, covered_s, tenant, max_groups)

    def _present(self) -> MissProfile:
        """Return the profile of the present period. The lock must be held."""
        now_s = self._clock()
        if now_s - self._period_start_s >= PERIOD_S:
            is_next = now_s - self._period_start_s < 2 * PERIOD_S
            former = self._profiles[0] if is_next else MissProfile()
            self._former_start_s = self._period_start_s if is_next else now_s
            self._period_start_s = now_s
            self._profiles = [MissProfile(), former]
        return self._profiles[0]

    def _may_wait(self, num_bytes: int) -> bool:
        """Reserve room in the queue. The lock must be held."""
        if self._num_waiting_bytes and self._num_waiting_bytes + num_bytes > _MAX_WAITING_BYTES:
            return False
        self._num_waiting_bytes += num_bytes
        return True

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, AdmittedPrompt):
                self._load_tokenizer()
            start_s = self._work_clock()
            num_bytes, engine_s = 0, 0.0
            try:
                if isinstance(item, _Segment):
                    num_bytes = item.end - item.start
                    tokens = _array(item.tokens[item.start : item.end])
                    self._table.add(tokens, self._seed_of(item.tenant), item.place)
                elif isinstance(item, AdmittedPrompt):
                    num_bytes = len(item.tokens)
                    engine_s = self._examine(item)
                else:
                    with self._lock:
                        for each in self._profiles:
                            each.forget(item.tenant)
            except (RadixKVError, CancelledError, TimeoutError) as error:
                _log.debug("a miss was not examined: %s", error)
            except Exception:  # noqa: BLE001 - a prompt that cannot be examined must not end the thread
                _log.exception("a miss could not be examined")
            with self._lock:
                self._num_waiting_bytes -= num_bytes
                self._credit_s -= self._work_clock() - start_s + engine_s

    def _load_tokenizer(self) -> None:
        load, self.load_decode = self.load_decode, None
        if load is not None:
            try:
                self._decode = load()
            except ValueError as error:
                _log.debug("causes of misses have no text, because the model has no tokenizer: %s", error)

    def _examine(self, prompt: AdmittedPrompt) -> float:
        """Find out why a prompt was not reused, and add it to the profile. Returns CPU seconds of the engine's thread.

        Raises:
            RadixKVError, CancelledError, TimeoutError: the engine does not answer.
        """
        with self._lock:
            if self._credit_s < 0:
                return 0.0
        assert self._find_branches is not None, "the profiler has been started"
        namespace = prompt.namespace
        tokens = _array(prompt.tokens[: _MAX_TOKENS * TOKEN_BYTES])
        counts = self._table.places(tokens[prompt.cached_tokens :], self._seed_of(namespace.tenant))
        places = [place for place, _ in counts.most_common(MAX_PLACES)]
        found = self._find_branches(places, namespace.tenant, prompt.session_id).result(_TIMEOUT_S)
        finding = self._finding(prompt, tokens, found.branches)
        missed_tokens = len(prompt.tokens) // TOKEN_BYTES - prompt.cached_tokens
        more = MissCounts(examined_misses=1, examined_tokens=missed_tokens, first_prompts=finding is None)
        with self._lock:
            profile = self._present()
            profile.count(namespace.tenant, more)
            if finding is not None:
                lost_s = None if found.token_s is None else finding.lost_tokens * found.token_s
                profile.add(namespace.tenant, finding, lost_s)
        return found.took_s

    def _finding(self, prompt: AdmittedPrompt, tokens: Tokens, branches: Sequence[NamedBranch]) -> Finding | None:
        """Return what a prompt lost: by a difference to a branch, or because the branch is in another namespace."""
        cached, max_tokens = prompt.cached_tokens, tokens.size + MAX_SPAN_TOKENS
        earlier: list[Earlier] = []
        elsewhere: Finding | None = None
        for each in branches:
            others = _array(each.branch.tokens(max_tokens))
            if _names(each.namespace) == _names(prompt.namespace):
                logged = LoggedPrompt("", others.size, each.namespace, each.session_id)
                earlier.append(Earlier(logged, others))
                continue
            num_lost = min(num_equal_tokens(tokens, others), tokens.size - 1) - cached
            if num_lost >= MIN_MISSED_TOKENS and (elsewhere is None or num_lost > elsewhere.lost_tokens):
                cause = cause_of_namespace(prompt.namespace, each.namespace)
                elsewhere = Finding(GroupKey(cause), cached, num_lost)
        logged = LoggedPrompt("", tokens.size, prompt.namespace, prompt.session_id)
        finding = Examiner(self._decode).examine(logged, tokens, cached, earlier, MIN_MISSED_TOKENS)
        if elsewhere is not None and (finding is None or elsewhere.lost_tokens >= finding.lost_tokens):
            return elsewhere
        return finding

    def _seed_of(self, tenant: str) -> int:
        return Namespace("", tenant).seed ^ self._seed


def _names(namespace: Namespace) -> Namespace:
    """Return the names that decide who shares tokens; a public prefix does not change them."""
    return namespace._replace(public_prefix="")


def _array(tokens: bytes) -> Tokens:
    """Return tokens without the marks of invoked adapters."""
    return np.frombuffer(plain(tokens), "<u4")
