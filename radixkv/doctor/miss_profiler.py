"""Examines a sample of the misses of a running server, on a thread of its own, in bounded time and memory."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import NamedTuple

from radixkv.api.explanation import NamedBranch
from radixkv.api.miss_reason import MissReason
from radixkv.doctor.causes import CAUSE_OF_REASON, MissCause, cause_of_namespace
from radixkv.doctor.examination import Earlier, Examiner, as_uint32
from radixkv.doctor.finding import Finding, GroupKey
from radixkv.doctor.miss_profile import MissCounts, MissProfile, MissReport, report_of
from radixkv.doctor.prompt_log import LoggedPrompt
from radixkv.doctor.window_table import WindowTable
from radixkv.errors import RadixKVError
from radixkv.explain.comparison import Decode
from radixkv.explain.realignment import MAX_SPAN_TOKENS, Tokens, num_equal_tokens
from radixkv.invocation import strip_marks
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES

MIN_MISSED_TOKENS = 256
"""A prompt that computes fewer tokens counts as a hit."""

PERIOD_S = 3600.0
"""The report covers the current period and the previous one."""

MAX_COMPARED_TOKENS = 131_072
"""Maximum number of compared tokens, from the beginning of a prompt."""

MAX_BRANCHES = 4
"""Maximum number of cached branches with which a prompt is compared."""

MAX_SEGMENTS = 8
"""Maximum number of segments whose branches the engine looks up for a prompt."""

_MAX_DIFFERENCES = 32  # to each branch
_MAX_WAITING_BYTES = 2 * 2**20

# The credit is the CPU time that examinations may still use. It may become negative, since the time that a prompt with
# many differences takes is known only afterwards.
_FIRST_CREDIT_S = 0.1
_MAX_CREDIT_S = 1.0
_MIN_CREDIT_S = -1.0
_TIMEOUT_S = 60.0  # for the engine to look up branches
_CLOSE_LIMIT_S = 5.0

_log = logging.getLogger(__name__)


def is_miss(num_tokens: int, cached_tokens: int) -> bool:
    """Whether a prompt of `num_tokens`, of which `cached_tokens` are reused, counts as a miss."""
    return num_tokens - cached_tokens >= MIN_MISSED_TOKENS


class AdmittedPrompt(NamedTuple):
    """A prompt as it was admitted.

    Attributes:
        namespace: the namespace that it reads.
        session_id: session of the prompt; empty for none.
        tokens: little-endian uint32 bytes.
        cached_tokens: number of reused tokens.
        miss_reason: why the other tokens are not reused.
        is_evicted_by_self: if the other tokens were evicted, whether this was for tokens of the same tenant; None if it
            is not known.
    """

    namespace: Namespace
    session_id: str
    tokens: bytes
    cached_tokens: int
    miss_reason: MissReason
    is_evicted_by_self: bool | None = None

    @property
    def num_missed_tokens(self) -> int:
        """Tokens that are computed."""
        return len(self.tokens) // TOKEN_BYTES - self.cached_tokens

    @property
    def known_cause(self) -> MissCause | None:
        """The cause, if the cache knows it; None if the prompt has to be compared with others."""
        cause = CAUSE_OF_REASON.get(self.miss_reason)
        if cause is not MissCause.EVICTED or self.is_evicted_by_self is None:
            return cause
        return MissCause.EVICTED_BY_OWN if self.is_evicted_by_self else MissCause.EVICTED_BY_OTHERS


class Branches(NamedTuple):
    """What the engine knows about the cached prompts that resemble a prompt.

    Attributes:
        branches: cached branches of the tenant of the prompt, from their beginning on.
        token_s: seconds that recent requests of the tenant took per computed token; None without measurements.
        cpu_s: CPU seconds that the engine's thread used to find the branches.
    """

    branches: Sequence[NamedBranch]
    token_s: float | None
    cpu_s: float


FindBranches = Callable[[Sequence[int], str, str], "Future[Branches]"]
"""Finds the branches that contain segments. Arguments: numbers of the segments, tenant, and session or ''."""


class _Miss(NamedTuple):
    prompt: AdmittedPrompt  # with at most `MAX_COMPARED_TOKENS`
    num_missed_tokens: int
    num_forget_calls: int  # `MissProfiler._num_forget_calls` when the miss was queued


class _Segment(NamedTuple):
    """New tokens of a cached segment; see `MissProfiler.add_segment`."""

    tenant: str
    tokens: bytes
    segment_number: int


class MissProfiler:
    """Groups the misses of a server by cause.

        engine's thread     admitted prompts ──┐                   ┌──▶ branches that resemble the prompt
                            new segments ──────┴─▶ queue           │
        profiler's thread               WindowTable ── candidates ─┴─▶ Examiner ─▶ MissProfile

    A prompt is compared with the cached branches of its own tenant that contain the same passages, in any namespace.
    These are found by a table with a sample of the windows of the segments that were published last.

    The thread may use a share of the time of the steps that compute prompts. While this time is used up, misses are
    counted but not examined. Its work for new segments, about 10 ns per token, is not counted. All memory is bounded:
    the table, the queue, the profile, and what is compared at a time.

    Args:
        share: share of the time of steps that the thread may use.
        clock: returns seconds, monotonic.
        work_clock: returns the CPU seconds of the calling thread.

    Attributes:
        load_decode: loads the tokenizer of the model and returns its `decode`, or raises ValueError; called at most
            once, on the thread. None after the call, and without a tokenizer.
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
        self._queue: queue.SimpleQueue[_Miss | _Segment | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the attributes below, up to `_is_closing`
        self._credit_s = _FIRST_CREDIT_S
        self._num_waiting_bytes = 0
        self._num_forget_calls = 0  # each call of `forget` discards the findings of the misses that wait
        self._period_start_s = self._start_s = clock()
        self._profiles = [MissProfile(), MissProfile()]  # of the current period and of the previous one
        self._awaited: Future[Branches] | None = None  # what the thread waits for
        self._is_closing = False
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
        """End the thread after the miss that it examines now. Waits for at most 5 s."""
        with self._lock:
            self._is_closing = True
            if self._awaited is not None:
                self._awaited.cancel()
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_LIMIT_S)

    def add_step(self, seconds: float) -> None:
        """Give the thread its share of the time of a step that computed prompts."""
        with self._lock:
            self._credit_s = min(_MAX_CREDIT_S, self._credit_s + self._share * seconds)

    def add_prompt(self, prompt: AdmittedPrompt) -> None:
        """Count a prompt, and queue it if it is a miss and there is time to examine it. For the engine's thread."""
        tenant = prompt.namespace.tenant
        num_tokens = len(prompt.tokens) // TOKEN_BYTES
        counts = MissCounts(prompts=1, prompt_tokens=num_tokens, cached_tokens=prompt.cached_tokens)
        if not is_miss(num_tokens, prompt.cached_tokens):
            with self._lock:
                self._current_profile().count(tenant, counts)
            return
        num_missed = prompt.num_missed_tokens
        counts = counts._replace(misses=1, missed_tokens=num_missed)
        cause = prompt.known_cause
        if cause is not None:
            counts = counts._replace(examined_misses=1, examined_tokens=num_missed)
        compared = prompt._replace(tokens=prompt.tokens[: MAX_COMPARED_TOKENS * TOKEN_BYTES])
        with self._lock:
            profile = self._current_profile()
            profile.count(tenant, counts)
            if cause is not None:
                profile.add(tenant, Finding(GroupKey(cause), prompt.cached_tokens, num_missed - 1, is_bound=True), None)
                return
            if self._credit_s <= 0 or not profile.can_track(tenant) or compared.num_missed_tokens < MIN_MISSED_TOKENS:
                return
            if self._reserve_bytes(len(compared.tokens)):
                self._queue.put(_Miss(compared, num_missed, self._num_forget_calls))

    def add_segment(self, tenant: str, tokens: bytes, segment_number: int) -> None:
        """Queue new tokens of a cached segment, so that later misses can be compared with it. For the engine's thread.

        Args:
            tenant: the tenant that published them.
            tokens: little-endian uint32 bytes.
            segment_number: number of the segment; see `Node.segment_number`.
        """
        with self._lock:
            if self._reserve_bytes(len(tokens)):
                self._queue.put(_Segment(tenant, tokens, segment_number))

    def forget(self, tenant: str | None) -> None:
        """Forget the misses of a tenant, or of all if it is None, and discard the findings of all waiting misses."""
        with self._lock:
            self._num_forget_calls += 1
            for each in self._profiles:
                each.forget(tenant)

    def report(self, tenant: str | None, max_groups: int) -> MissReport:
        """Return what is known about the misses of a tenant, or of all tenants if it is None. For any thread."""
        with self._lock:
            self._current_profile()  # begins a new period if it is due
            start_s = max(self._start_s, self._period_start_s - PERIOD_S)
            covered_s = self._clock() - start_s
            misses = [each for profile in self._profiles for each in profile.misses_of(tenant)]
        return report_of(misses, covered_s, max_groups)

    def _current_profile(self) -> MissProfile:
        """Return the profile of the current period. The lock must be held."""
        num_ended_periods = int((self._clock() - self._period_start_s) // PERIOD_S)
        if num_ended_periods > 0:
            previous = self._profiles[0] if num_ended_periods == 1 else MissProfile()
            self._period_start_s += num_ended_periods * PERIOD_S
            self._profiles = [MissProfile(), previous]
        return self._profiles[0]

    def _reserve_bytes(self, num_bytes: int) -> bool:
        """Reserve memory for an item of the queue. Returns whether it is within the limit. The lock must be held."""
        if self._num_waiting_bytes and self._num_waiting_bytes + num_bytes > _MAX_WAITING_BYTES:
            return False
        self._num_waiting_bytes += num_bytes
        return True

    def _run(self) -> None:
        while (item := self._queue.get()) is not None and not self._is_closing:
            used_s = 0.0
            try:
                if isinstance(item, _Segment):
                    self._table.add(_token_array(item.tokens), self._seed_of(item.tenant), item.segment_number)
                else:
                    self._load_tokenizer()
                    start_s = self._work_clock()
                    try:
                        used_s = self._examine(item)
                    finally:
                        used_s += self._work_clock() - start_s
            except (RadixKVError, CancelledError, TimeoutError) as error:
                _log.debug("a miss was not examined: %s", type(error).__name__)
            except Exception as error:  # noqa: BLE001 - a prompt that cannot be examined must not end the thread
                # The message of the error might contain tokens, so only its class and its place are logged.
                frame = traceback.extract_tb(error.__traceback__)[-1]
                class_name = type(error).__name__
                _log.error("a miss could not be examined: %s at %s:%s", class_name, frame.filename, frame.lineno)
            with self._lock:
                self._num_waiting_bytes -= len(item.tokens if isinstance(item, _Segment) else item.prompt.tokens)
                self._credit_s = max(_MIN_CREDIT_S, self._credit_s - used_s)

    def _load_tokenizer(self) -> None:
        load, self.load_decode = self.load_decode, None
        if load is not None:
            try:
                self._decode = load()
            except ValueError as error:
                _log.debug("causes of misses have no text, because the model has no tokenizer: %s", error)

    def _examine(self, miss: _Miss) -> float:
        """Find out why a prompt was not reused, and add the finding to the profile.

        Returns:
            CPU seconds that the engine's thread took for this.

        Raises:
            RadixKVError, CancelledError, TimeoutError: the engine does not answer.
        """
        assert self._find_branches is not None, "the profiler has been started"
        prompt = miss.prompt
        tenant = prompt.namespace.tenant
        with self._lock:
            if self._credit_s <= 0:
                return 0.0
        tokens = _token_array(prompt.tokens)
        num_windows = self._table.find(tokens[prompt.cached_tokens :], self._seed_of(tenant))
        segment_numbers = [segment_number for segment_number, _ in num_windows.most_common(MAX_SEGMENTS)]
        reply = self._await_branches(segment_numbers, tenant, prompt.session_id)
        finding = self._finding(prompt, tokens, reply.branches)
        counts = MissCounts(
            examined_misses=1, examined_tokens=miss.num_missed_tokens, first_prompts=int(finding is None)
        )
        with self._lock:
            if miss.num_forget_calls == self._num_forget_calls:
                profile = self._current_profile()
                profile.count(tenant, counts)
                if finding is not None:
                    lost_s = None if reply.token_s is None else finding.lost_tokens * reply.token_s
                    profile.add(tenant, finding, lost_s)
        return reply.cpu_s

    def _await_branches(self, segment_numbers: Sequence[int], tenant: str, session_id: str) -> Branches:
        assert self._find_branches is not None
        future = self._find_branches(segment_numbers, tenant, session_id)
        with self._lock:
            self._awaited = future
            if self._is_closing:
                future.cancel()
        try:
            return future.result(_TIMEOUT_S)
        finally:
            future.cancel()

    def _finding(self, prompt: AdmittedPrompt, tokens: Tokens, branches: Sequence[NamedBranch]) -> Finding | None:
        """Return what a prompt lost because it differs from a branch, or because a branch is not shared with it."""
        num_cached = prompt.cached_tokens
        max_tokens = tokens.size + MAX_SPAN_TOKENS
        earlier: list[Earlier] = []
        unshared: Finding | None = None  # equal tokens that are cached, but not shared with the prompt
        for each in branches:
            marked_tokens = each.branch.tokens(max_tokens)
            branch_tokens = _token_array(marked_tokens)
            num_equal = num_equal_tokens(tokens, branch_tokens)
            cause = None
            if _drop_public_prefix(each.namespace) != _drop_public_prefix(prompt.namespace):
                cause = cause_of_namespace(prompt.namespace, each.namespace)
            else:
                earlier_prompt = LoggedPrompt("", branch_tokens.size, each.namespace, each.session_id)
                earlier.append(Earlier(earlier_prompt, branch_tokens))
                if marked_tokens[: num_equal * TOKEN_BYTES] != prompt.tokens[: num_equal * TOKEN_BYTES]:
                    cause = MissCause.ADAPTER_CHANGED  # equal tokens were computed by another invoked adapter
            num_lost = min(num_equal, tokens.size - 1) - num_cached
            is_largest = unshared is None or num_lost > unshared.lost_tokens
            if cause is not None and num_lost >= MIN_MISSED_TOKENS and is_largest:
                unshared = Finding(GroupKey(cause), num_cached, num_lost)
        logged = LoggedPrompt("", tokens.size, prompt.namespace, prompt.session_id)
        finding = Examiner(self._decode, _MAX_DIFFERENCES).examine(
            logged, tokens, num_cached, earlier, MIN_MISSED_TOKENS
        )
        if unshared is not None and (finding is None or unshared.lost_tokens >= finding.lost_tokens):
            return unshared
        if finding is not None and prompt.namespace.salt:  # a reader who does not know the salt must not see the prompt
            finding = replace(finding, sample=None)
        return finding

    def _seed_of(self, tenant: str) -> int:
        return Namespace("", tenant).seed ^ self._seed


def _drop_public_prefix(namespace: Namespace) -> Namespace:
    """Return a namespace without its public prefix, which has no effect on who shares tokens."""
    return namespace._replace(public_prefix="")


def _token_array(tokens: bytes) -> Tokens:
    """Return tokens as numbers, without the marks of invoked adapters."""
    return as_uint32(strip_marks(tokens))
