"""A request inside the engine, from its arrival until its result."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import InitVar, dataclass, field

import numpy as np
import numpy.typing as npt

from radixkv.api.awaits import Awaits
from radixkv.api.compression import Compression
from radixkv.api.constraint import Matcher
from radixkv.api.logprob_table import LogprobTable
from radixkv.api.miss_reason import MissReason
from radixkv.api.params import PrefillParams
from radixkv.api.result import FinishReason, GenerateResult, OnTokens, PrefillResult, Usage
from radixkv.api.sampling import Sampling
from radixkv.cache.lease import Lease
from radixkv.cache.recurrent_states import StateLease
from radixkv.invocation import Invocation
from radixkv.namespace import Namespace, PromptKey
from radixkv.offload.index.prompt_blocks import FetchedBlocks


class Outcome(enum.Enum):
    """How a request ended."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Generation:
    """The generated part of a request.

    Attributes:
        sampling: how tokens are sampled, and when to stop.
        stop_token_ids: tokens that end it. They include the model's end-of-sequence tokens unless `ignore_eos` is set.
        on_tokens: called on the engine's thread with each new token except the last, which comes with the result.
        token_ids: tokens generated so far.
        prompt_logprobs: log probabilities of the prompt's tokens after the first, as far as they are computed; None
            before that.
        prompt_ids: the distinct tokens of the prompt, int64 and sorted; None until a penalty needs them.
        matcher: the state of the constraint; None without one, and before the first token is sampled. It is kept while
            the request is preempted.
        is_finished: its caller stopped it, or its constraint allows no more tokens.
    """

    sampling: Sampling
    stop_token_ids: frozenset[int]
    on_tokens: OnTokens
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: LogprobTable | None = None
    prompt_ids: npt.NDArray[np.int64] | None = None
    matcher: Matcher | None = None
    is_finished: bool = False

    @classmethod
    def of(cls, sampling: Sampling, eos_token_ids: frozenset[int], on_tokens: OnTokens) -> Generation:
        """Return a generation with the stop tokens of `sampling`, and those of the model unless `ignore_eos` is set."""
        stops = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos_token_ids)
        return cls(sampling, stops, on_tokens)

    def append(self, token_id: int) -> None:
        """Append the next token. Raises what the constraint raises."""
        self.token_ids.append(token_id)
        if self.matcher is not None and token_id not in self.stop_token_ids:
            self.matcher.accept(token_id)
            self.is_finished |= self.matcher.is_finished

    @property
    def has_tool_call(self) -> bool:
        """Whether it contains a tool call. Complexity: O(generated tokens)."""
        is_tool_call = self.sampling.is_tool_call
        return is_tool_call is not None and is_tool_call(self.token_ids)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it ends after its last token; None if it continues."""
        if self.is_finished:
            return FinishReason.STOP
        if self.token_ids and self.token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.sampling.max_new_tokens else None


@dataclass(slots=True)
class RequestTimes:
    """When a request reached its stages, on the clock of `time.monotonic`; for results, metrics and traces.

    Attributes:
        received_s: its arrival.
        scheduled_s: its first admission; None until then.
        prefilled_s: its first token; None until then.
    """

    received_s: float
    scheduled_s: float | None = None
    prefilled_s: float | None = None


@dataclass(slots=True)
class PromptReuse:
    """The part of its prompt that a request reused, and why it was not more.

    It is set at each admission until the request has computed a token.

    Attributes:
        cached_tokens: prompt tokens that it reused.
        public_tokens: those of them that came from a public prefix.
        loaded_tokens: those of them that were loaded for this admission, by tier.
        stored_upto: tokens at the beginning of the prompt that were on the device or in tiers when it was looked up.
        miss_reason: why the other tokens were not reused.
    """

    cached_tokens: int = 0
    public_tokens: int = 0
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    stored_upto: int = 0
    miss_reason: MissReason = MissReason.COLD


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """A request inside the engine. Owned by the engine's thread; only `future` is shared with the caller.

        tokens      [0 ............. prompt .............)[ generated ... )
                                 ^ computed_upto: K/V exist before it      ^ num_tokens: the next token follows here

    Attributes:
        params: the prompt and its options.
        namespace: the namespace whose requests may share its cached tokens.
        future: the result of a prefill, or of a generation if `generation` is set.
        generation: None for a prefill.
        former: the keys of its prompt with the former adapters of the same name; they only explain a miss.
        fetched: blocks of its prompt that were fetched from another server; None if there are none, or once they were
            used.
        invocation: where an invoked adapter begins; None if `namespace.adapter` computes the whole prompt.
        is_prefetch: whether it only loads stored blocks, for a later request; see `Prefetcher`.
        prompt_tokens: the prompt in the form of the cache, with the tokens of an invoked adapter marked; little-endian
            uint32 bytes.
        num_prompt_tokens: its length in tokens.
        num_tokens: length of the prompt and the generated tokens together.
        tenant: its caller's tenant.
        adapter: digest of the adapter that computes it or a part of it; empty for the base model.
        compression: the rule by which it drops K/V; None to keep all. A compressed generation is never preempted, since
            it could not compute again the K/V that it dropped.
        times: when it arrived, was admitted and had its first token.
        reuse: the part of its prompt that it reused.
        arrival: number of requests that arrived before it.
        rank: sort key among its tenant's requests, lowest first. One point of urgency counts as one second of waiting.
        lease: the lease of its blocks; None while it has none.
        state_lease: the lease of its recurrent states; None while it does not run, and for a model without states.
        num_nodes: nodes of the tree that were visited to find reusable tokens, at the last admission.
        has_computed: whether it has computed any token.
        computed_upto: tokens whose K/V exist, reused ones included.
        found_tokens: tokens whose K/V were cached at the last attempt to admit it; for a model with states including
            those after the last snapshot. 0 if no running request computed tokens that this one could wait for, because
            the attempt then did not count cached tokens.
        written_tokens: tokens that it published.
        recomputed_tokens: tokens that were computed again after a preemption.
        is_revoked: whether its namespace was purged after it arrived; if so, it publishes nothing.
        is_over: whether it has ended.
    """

    params: PrefillParams
    namespace: Namespace
    future: Future[PrefillResult] | Future[GenerateResult]
    received_s: InitVar[float]
    generation: Generation | None = None
    former: Sequence[PromptKey] = ()
    invocation: Invocation | None = None
    fetched: FetchedBlocks | None = None
    is_prefetch: bool = False
    prompt_tokens: bytes = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    tenant: str = field(init=False)
    adapter: str = field(init=False)
    compression: Compression | None = field(init=False)
    times: RequestTimes = field(init=False)
    reuse: PromptReuse = field(default_factory=PromptReuse)
    arrival: int = 0
    rank: tuple[float, int] = (0.0, 0)
    lease: Lease | None = None
    state_lease: StateLease | None = None
    num_nodes: int = 0
    has_computed: bool = False
    computed_upto: int = 0
    found_tokens: int = 0
    written_tokens: int = 0
    recomputed_tokens: int = 0
    is_revoked: bool = False
    is_over: bool = False

    def __post_init__(self, received_s: float) -> None:
        self.times = RequestTimes(received_s)
        params, invocation, generation = self.params, self.invocation, self.generation
        self.tenant = params.caller.tenant
        self.num_prompt_tokens = self.num_tokens = params.num_tokens
        self.compression = None
        if generation is not None:
            self.num_tokens += len(generation.token_ids)
            self.compression = generation.sampling.compression
        if invocation is None:
            self.prompt_tokens = params.tokens
            self.adapter = self.namespace.adapter
        else:
            self.prompt_tokens = invocation.marked(params.tokens)
            self.adapter = invocation.digest

    def set_arrival(self, arrival: int) -> None:
        """Set its arrival number and its rank."""
        self.arrival = arrival
        self.rank = self.times.received_s - self.params.urgency, arrival

    def is_among(self, tenant: str | None, adapter: str | None, salt: str | None) -> bool:
        """Whether it has this tenant, salt and adapter; None matches any name.

        The adapter is the one that computes it, which an invoked adapter's namespace does not name.
        """
        return self.namespace._replace(adapter=self.adapter).is_among(tenant, adapter, salt)

    def append(self, token_id: int) -> None:
        """Append the next token of a generation. If its constraint raises, the token is appended nevertheless."""
        assert self.generation is not None, "only a generation has more than one token"
        self.num_tokens += 1
        self.generation.append(token_id)

    def extend_lease(self) -> None:
        """Add the generated tokens to the lease of a running request, and allocate the blocks for them.

        Raises:
            OutOfBlocks, QuotaExceeded: there are too few blocks. The lease is unchanged.
        """
        lease = self.open_lease
        if lease.num_tokens < self.num_tokens:
            lease.extend(self.tokens_from(lease.num_tokens))

    def release(self) -> None:
        """Release its lease and the slots of its states, if it holds any."""
        if self.state_lease is not None:
            self.state_lease.close()
            self.state_lease = None
        if self.lease is not None:
            self.lease.close()
            self.lease = None

    @property
    def open_lease(self) -> Lease:
        """The lease of a running request."""
        assert self.lease is not None, "a running request holds a lease"
        return self.lease

    @property
    def num_expected_tokens(self) -> int:
        """Number of its tokens that are published at its end, unless the generation stops early."""
        if self.generation is None or self.compression is not None:  # a compressed generation uses private blocks
            return self.num_prompt_tokens
        return self.num_prompt_tokens + self.generation.sampling.max_new_tokens

    @property
    def num_private_tokens(self) -> int:
        """Number of K/V entries for which it needs private blocks in addition to the blocks of its prompt."""
        if self.generation is None or self.compression is None:
            return 0
        return self.compression.max_entries(self.num_prompt_tokens, self.generation.sampling.max_new_tokens)

    @property
    def tokens(self) -> bytes:
        """The prompt and the generated tokens in the form of the cache. Complexity: a copy if any was generated."""
        if self.num_tokens == self.num_prompt_tokens:
            return self.prompt_tokens
        return self.prompt_tokens + self.tokens_from(self.num_prompt_tokens)

    def tokens_from(self, start: int) -> bytes:
        """Return the generated tokens from position `start` on, marked; `start` is not inside the prompt."""
        token_ids = [] if self.generation is None else self.generation.token_ids[start - self.num_prompt_tokens :]
        if not token_ids:
            return b""
        mark = 0 if self.invocation is None else self.invocation.mark
        return (np.array(token_ids, dtype="<u4") + np.uint32(mark)).tobytes()

    @property
    def num_left(self) -> int:
        """Number of tokens to compute until the next token is known."""
        return self.num_tokens - self.computed_upto

    @property
    def wants_all_logits(self) -> bool:
        """Whether the logits after each of its next tokens are needed for the log probabilities of its prompt."""
        generation = self.generation
        if generation is None or generation.sampling.prompt_logprobs is None:
            return False
        return len(generation.prompt_logprobs or ()) < self.num_prompt_tokens - 1

    @property
    def is_decoding(self) -> bool:
        """Whether only the last generated token is left to compute."""
        return self.times.prefilled_s is not None and self.num_tokens - self.computed_upto == 1

    @property
    def is_preempted(self) -> bool:
        """Whether it was preempted and does not run again yet."""
        return self.times.scheduled_s is not None and self.lease is None

    @property
    def awaits(self) -> Awaits:
        """What its session waits for when it has ended: what its caller said, or else what its answer shows."""
        generation = self.generation
        if self.params.awaits is not Awaits.UNKNOWN or generation is None:
            return self.params.awaits
        if generation.finish_reason is not FinishReason.STOP:
            return Awaits.UNKNOWN
        return Awaits.TOOL if generation.has_tool_call else Awaits.USER

    def is_late(self, now_s: float) -> bool:
        """Whether its deadline has passed. A request that is cancelled after its deadline counts as late."""
        return self.params.deadline_s is not None and self.params.deadline_s <= now_s

    @property
    def usage(self) -> Usage:
        """Its tokens so far."""
        reuse = self.reuse
        loaded = reuse.loaded_tokens
        host_tokens = loaded.get("host", 0)
        disk_tokens = loaded.get("disk", 0)
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=reuse.cached_tokens,
            computed_tokens=self.num_prompt_tokens - reuse.cached_tokens,
            written_tokens=self.written_tokens,
            generated_tokens=self.num_tokens - self.num_prompt_tokens,
            recomputed_tokens=self.recomputed_tokens,
            public_tokens=reuse.public_tokens,
            host_tokens=host_tokens,
            disk_tokens=disk_tokens,
            remote_tokens=sum(loaded.values()) - host_tokens - disk_tokens if loaded else 0,
        )
