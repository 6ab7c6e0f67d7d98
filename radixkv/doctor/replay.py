"""Replays a log through the prefix cache, optionally with fixed causes, and finds out what each prompt lost."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from radixkv.api.miss_reason import MissReason
from radixkv.cache.changes import Listener
from radixkv.cache.node import Node
from radixkv.cache.policies import make_policy
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.config import CacheConfig
from radixkv.doctor.causes import CAUSE_OF_REASON, MissCause, cause_of_namespace
from radixkv.doctor.content_index import ContentIndex
from radixkv.doctor.examination import Earlier, as_uint32
from radixkv.doctor.finding import Finding, GroupKey, Replacement, apply_replacements
from radixkv.doctor.prompt_log import LoggedPrompt, PromptLog, SegmentOf, TokenStore
from radixkv.errors import CapacityError
from radixkv.explain.realignment import MIN_EQUAL_TOKENS, Tokens
from radixkv.namespace import Namespace
from radixkv.planning.trace import MIN_STEP_S
from radixkv.tokens import TOKEN_BYTES, prefix_fingerprint

MIN_LOST_TOKENS = 64
"""Smaller losses of a prompt are not reported by default."""

_DEFAULTS = CacheConfig()
_MAX_ROUNDS = 8  # how often one prompt is examined and changed
_MIN_FIXED_TOKENS = 8  # a fixed cause is not removed where it loses fewer tokens
_MAX_GROWTH = 4  # the replacements may multiply the tokens of the log by this factor at most
_MAX_NAMESPACES = 32  # namespaces that are compared, of prompts with the same beginning
_MAX_FORMER = 3  # a prompt is compared with this many former prompts of its session


class PromptExaminer(Protocol):
    """Compares a prompt with earlier ones; see `Examiner` and `BlockExaminer`."""

    def examine(
        self, prompt: LoggedPrompt, tokens: Tokens, num_cached: int, earlier: list[Earlier], min_lost_tokens: int
    ) -> Finding | None:
        """Return why a prompt could not reuse more of earlier ones."""


class ReplayedPrompt(NamedTuple):
    """The result of one prompt.

    Attributes:
        num_tokens: tokens of the prompt, which differ from the log if a cause was fixed.
        cached_tokens: number of reused tokens.
        finding: what the prompt lost, and why; None if nothing.
        is_first: whether the prompt would reuse nothing even if nothing were ever evicted, and no loss that is large
            enough was found.
    """

    num_tokens: int
    cached_tokens: int
    finding: Finding | None
    is_first: bool


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The cache of a replay.

    Attributes:
        capacity_tokens: None for a cache that never evicts anything, so that all losses are the sender's.
        block_size: tokens per block.
        policy: eviction policy.
        probation_share: see `PrefixCache`.
    """

    capacity_tokens: int | None = None
    block_size: int = _DEFAULTS.block_size
    policy: str = _DEFAULTS.policy
    probation_share: float = _DEFAULTS.probation_share


class _Evictions(Listener):
    """Remembers for which tenant each prefix was evicted."""

    def __init__(self, max_prefixes: int) -> None:
        self._max_prefixes = max_prefixes
        self._tenants: OrderedDict[int, str] = OrderedDict()
        self.tenant = ""  # the tenant whose prompt is being replayed

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Remember the tenant for which a leaf is evicted."""
        del leaf, num_blocks, reason, now_s
        self._tenants[fingerprint] = self.tenant
        self._tenants.move_to_end(fingerprint)
        if len(self._tenants) > self._max_prefixes:
            self._tenants.popitem(last=False)

    def tenant_of(self, fingerprint: int) -> str | None:
        """Return the tenant for which a prefix was evicted; None if it is not known."""
        return self._tenants.get(fingerprint)


class Replay:
    """Replays the prompts of a log in order; each is leased, published and closed before the next one.

    A cache that never evicts shows how much could be reused. With a capacity, a second cache shows how much
    is reused with evictions; what only the first cache reuses was evicted, or has expired.

    Lengths and positions are in units of the log, unless a name says tokens; see `PromptLog.tokens_per_unit`.

    Args:
        log: the prompts.
        examiner: finds the causes of misses.
        size: the cache.
        fixed: groups whose cause is removed from each prompt before it is replayed: the prompt gets the tokens of the
            earlier prompt where the two differ, or the namespace of the earlier prompt.
        min_lost_tokens: losses of fewer tokens are not reported.
    """

    def __init__(
        self,
        log: PromptLog,
        examiner: PromptExaminer,
        size: CacheSize,
        fixed: Collection[GroupKey] = (),
        min_lost_tokens: int = MIN_LOST_TOKENS,
    ) -> None:
        self._log = log
        self._examiner = examiner
        self._min_lost_tokens = min_lost_tokens
        self._min_found_tokens = min(_MIN_FIXED_TOKENS, min_lost_tokens) if fixed else min_lost_tokens
        self._size = size
        self._fixed = frozenset(fixed)
        self._now_s = 0.0
        self._block_size = size.block_size if log.tokens_per_unit == 1 else 1
        self._max_units = _MAX_GROWTH * log.num_units
        # Enough blocks for the whole log with its replacements, so that nothing is evicted.
        num_blocks = (_MAX_GROWTH + 1) * (log.num_units // self._block_size + 2 * len(log))
        self._num_units = 0  # of all replayed prompts, with their replacements
        self._unbounded = PrefixCache(num_blocks, self._block_size, max_evicted_prefixes=0, clock=lambda: self._now_s)
        self._bounded: PrefixCache | None = None
        self._evictions = _Evictions(_DEFAULTS.evicted_prefixes)
        if size.capacity_tokens is not None:
            capacity = size.capacity_tokens // log.tokens_per_unit // self._block_size
            self._bounded = PrefixCache(
                capacity,
                self._block_size,
                policy=make_policy(size.policy, capacity),
                probation_share=size.probation_share,
                listeners=[self._evictions],
                clock=lambda: self._now_s,
            )
        self._index = ContentIndex(log.num_units)
        self._sessions: dict[tuple[Namespace, str], deque[int]] = {}
        self._namespaces_by_head: dict[bytes, OrderedDict[Namespace, None]] = {}  # by the first tokens of prompts
        self._changed = TokenStore()  # the changed prompts, with their answers
        self._changed_numbers: dict[int, int] = {}  # numbers in `_changed`, by index of the prompt

    def run(self, on_prompt: Callable[[], object] | None = None) -> Iterator[ReplayedPrompt]:
        """Yield the result of each prompt, in order.

        Args:
            on_prompt: called after each prompt.
        """
        with closing(self._changed):
            for index in range(len(self._log)):
                yield self._replay_prompt(index)
                if on_prompt is not None:
                    on_prompt()

    def _replay_prompt(self, index: int) -> ReplayedPrompt:
        prompt = self._log.prompts[index]
        logged_tokens, answer = self._log.tokens(index)
        self._now_s = max(self._now_s + MIN_STEP_S, prompt.time_s or 0.0)
        namespace, tokens, finding, num_cached = self._fix_prompt(prompt, logged_tokens)
        self._num_units += len(tokens) // TOKEN_BYTES
        if finding is not None and finding.lost_tokens < self._min_lost_tokens:
            finding = None
        is_first = not num_cached and finding is None
        _publish(self._unbounded, namespace, tokens, answer)
        num_tokens = prompt.num_tokens + (len(tokens) - len(logged_tokens)) // TOKEN_BYTES
        num_reused = num_cached
        cache_finding: Finding | None = None  # what the cache lost, and not the sender
        if self._bounded is not None:
            num_reused, cache_finding = self._replay_bounded(prompt, namespace, tokens, answer, num_cached)
        elif prompt.reported is not None and not self._fixed:
            cache_finding = self._reported_loss(prompt, num_cached)
        if cache_finding is not None and (finding is None or cache_finding.lost_tokens > finding.lost_tokens):
            finding = cache_finding
        self._remember(index, prompt, namespace, tokens, answer, is_changed=tokens != logged_tokens)
        return ReplayedPrompt(num_tokens, min(self._units_to_tokens(num_reused), num_tokens - 1), finding, is_first)

    def _units_to_tokens(self, units: int) -> int:
        return units * self._log.tokens_per_unit

    def _fix_prompt(self, prompt: LoggedPrompt, tokens: bytes) -> tuple[Namespace, bytes, Finding | None, int]:
        """Remove the fixed causes from a prompt.

        Returns:
            The namespace and the tokens with which it is replayed, what it loses, and how much it reuses.
        """
        namespace = prompt.namespace
        rounds: list[tuple[Replacement, ...]] = []
        for _ in range(_MAX_ROUNDS):
            num_cached = self._unbounded.match(namespace, tokens).cached_tokens
            finding = self._finding(prompt, namespace, tokens, num_cached, rounds)
            if finding is None or finding.key not in self._fixed:
                break
            if finding.namespace is not None:
                namespace = finding.namespace
                continue
            changed = apply_replacements(tokens, finding.replacements)
            if changed == tokens or self._num_units + len(changed) // TOKEN_BYTES > self._max_units:
                break
            rounds.append(finding.replacements)
            tokens = changed
        else:  # the last round has changed the prompt, which is not examined again
            num_cached = self._unbounded.match(namespace, tokens).cached_tokens
            finding = None
        return namespace, tokens, finding, num_cached

    def _finding(
        self,
        prompt: LoggedPrompt,
        namespace: Namespace,
        tokens: bytes,
        num_cached: int,
        rounds: list[tuple[Replacement, ...]],
    ) -> Finding | None:
        """Return why a prompt could not reuse more of all earlier prompts."""
        num_missed = len(tokens) // TOKEN_BYTES - 1 - num_cached
        if self._units_to_tokens(num_missed) < self._min_found_tokens:
            return None
        token_array = as_uint32(tokens)
        numbers = self._index.candidates(namespace.seed, token_array, num_cached)
        former = self._sessions.get((namespace, prompt.session), ())
        numbers = list(dict.fromkeys((*former, *numbers)))
        if prompt.segment_of is not None and rounds:
            prompt = replace(prompt, segment_of=_segment_before(prompt.segment_of, rounds))
        earlier = [self._earlier(each) for each in numbers]
        finding = self._examiner.examine(prompt, token_array, num_cached, earlier, self._min_found_tokens)
        namespace_finding = self._namespace_finding(namespace, tokens, num_cached)
        if namespace_finding is not None and (finding is None or namespace_finding.lost_tokens >= finding.lost_tokens):
            return namespace_finding
        return finding

    def _earlier(self, number: int) -> Earlier:
        """Return an earlier prompt as it was replayed, with its answer."""
        changed = self._changed_numbers.get(number)
        tokens = b"".join(self._log.tokens(number)) if changed is None else self._changed[changed]
        return Earlier(self._log.prompts[number], as_uint32(tokens))

    def _namespace_finding(self, namespace: Namespace, tokens: bytes, num_cached: int) -> Finding | None:
        """Return a finding if more of the prompt is cached in another namespace."""
        head = tokens[: MIN_EQUAL_TOKENS * TOKEN_BYTES]
        best_namespace, max_found = None, num_cached
        for other in reversed(self._namespaces_by_head.get(head, ())):
            if other != namespace:
                num_found = self._unbounded.match(other, tokens).cached_tokens
                if num_found > max_found:
                    best_namespace, max_found = other, num_found
        num_lost_tokens = self._units_to_tokens(max_found - num_cached)
        if best_namespace is None or num_lost_tokens < self._min_found_tokens:
            return None
        cause = cause_of_namespace(namespace, best_namespace)
        return Finding(GroupKey(cause), self._units_to_tokens(num_cached), num_lost_tokens, namespace=best_namespace)

    def _replay_bounded(
        self, prompt: LoggedPrompt, namespace: Namespace, tokens: bytes, answer: bytes, num_unbounded: int
    ) -> tuple[int, Finding | None]:
        """Replay a prompt in the cache that evicts. `num_unbounded` is what it reuses in the one that never evicts.

        Returns:
            How much it reuses, and what it lost because that was evicted or has expired; None if nothing.
        """
        cache = self._bounded
        assert cache is not None
        self._evictions.tenant = namespace.tenant
        num_cached = cache.match(namespace, tokens).cached_tokens
        reason = cache.explain(namespace, tokens, num_cached)
        next_end_bytes = (num_cached // cache.block_size + 1) * cache.block_size * TOKEN_BYTES
        evicted_for = self._evictions.tenant_of(prefix_fingerprint(namespace.seed, tokens, next_end_bytes))
        try:
            _publish(cache, namespace, tokens, answer)
        except CapacityError:  # the prompt is longer than the cache
            pass
        else:
            if prompt.retention is not None:
                cache.retain(namespace, tokens, prompt.retention)
        num_lost_tokens = self._units_to_tokens(num_unbounded - num_cached)
        if num_lost_tokens < self._min_lost_tokens or reason not in CAUSE_OF_REASON:
            return num_cached, None
        cause = CAUSE_OF_REASON[reason]
        if cause is MissCause.EVICTED and evicted_for is not None:
            cause = MissCause.EVICTED_BY_OWN if evicted_for == namespace.tenant else MissCause.EVICTED_BY_OTHERS
        return num_cached, Finding(GroupKey(cause), self._units_to_tokens(num_cached), num_lost_tokens)

    def _reported_loss(self, prompt: LoggedPrompt, num_cached: int) -> Finding | None:
        """Return the loss that a server has reported, if it reused less than a cache that never evicts."""
        reported = prompt.reported
        assert reported is not None
        num_lost_tokens = self._units_to_tokens(num_cached) - reported.cached_tokens
        cause = CAUSE_OF_REASON.get(reported.miss_reason)
        if cause is None or num_lost_tokens < self._min_lost_tokens:
            return None
        return Finding(GroupKey(cause), reported.cached_tokens, num_lost_tokens)

    def _remember(
        self, index: int, prompt: LoggedPrompt, namespace: Namespace, tokens: bytes, answer: bytes, *, is_changed: bool
    ) -> None:
        """Remember a replayed prompt, so that later ones are compared with it."""
        tokens_and_answer = tokens + answer
        if is_changed:
            self._changed_numbers[index] = self._changed.add(tokens_and_answer)
        self._index.add(index, namespace.seed, as_uint32(tokens_and_answer))
        if prompt.session:
            former = self._sessions.setdefault((namespace, prompt.session), deque(maxlen=_MAX_FORMER))
            former.appendleft(index)
        if len(tokens) >= MIN_EQUAL_TOKENS * TOKEN_BYTES:
            head = tokens[: MIN_EQUAL_TOKENS * TOKEN_BYTES]
            namespaces = self._namespaces_by_head.setdefault(head, OrderedDict())
            namespaces[namespace] = None
            namespaces.move_to_end(namespace)
            if len(namespaces) > _MAX_NAMESPACES:
                namespaces.popitem(last=False)


def _publish(cache: PrefixCache, namespace: Namespace, tokens: bytes, answer: bytes) -> None:
    with cache.lease(namespace, tokens) as lease:
        lease.commit(lease.num_tokens)
        if answer:
            lease.extend(answer)
            lease.commit(lease.num_tokens)


def _segment_before(segment_of: SegmentOf, rounds: list[tuple[Replacement, ...]]) -> SegmentOf:
    """Return a function that names the segment of a position after several rounds of replacements."""

    def segment(position: int) -> str:
        for replacements in reversed(rounds):
            position = _position_before(position, replacements)
        return segment_of(position)

    return segment


def _position_before(position: int, replacements: tuple[Replacement, ...]) -> int:
    """Return the position that a token had before replacements; for a new token, one in the replaced range."""
    growth = 0
    for each in replacements:
        start, num_new = each.start + growth, len(each.tokens) // TOKEN_BYTES
        if position < start:
            break
        if position < start + num_new:
            return min(each.start + position - start, max(each.start, each.end - 1))
        growth += num_new - (each.end - each.start)
    return position - growth
