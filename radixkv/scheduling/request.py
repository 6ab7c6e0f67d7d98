"""A request inside the engine, from its arrival until its answer."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from radixkv.api.compression import Compression
from radixkv.api.constraint import Matcher
from radixkv.api.logprob_table import LogprobTable
from radixkv.api.miss_reason import MissReason
from radixkv.api.params import PrefillParams
from radixkv.api.result import FinishReason, GenerateResult, OnTokens, PrefillResult, Usage
from radixkv.api.sampling import Sampling
from radixkv.cache.elsewhere.fetched import Fetched
from radixkv.cache.prompt_lease import PromptLease
from radixkv.cache.recurrent_states import StateLease
from radixkv.invocation import Invocation
from radixkv.namespace import Namespace, PromptKey


class Outcome(enum.Enum):
    """Ending of a request."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Generation:
    """The part of a request that goes on after its prompt.

    Attributes:
        sampling: how tokens are chosen, and when to stop.
        stop_token_ids: tokens that end it, the model's own end-of-sequence tokens included.
        on_tokens: called on the engine's thread with each new token but the last, which comes with the result.
        token_ids: tokens generated so far.
        prompt_logprobs: of the prompt's tokens but the first, as far as they are computed; None before any are.
        prompt_ids: the different tokens of the prompt, int64 and sorted; None until a penalty asks for them.
        matcher: says which tokens may come next; None without a constraint, and before the first token is chosen. It
            stays while the request is paused.
        is_finished: its caller wants no more tokens, or its constraint lets none come.
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
        """Return one that ends with its own stop tokens, and with those of the model unless they are to be ignored."""
        stops = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else eos_token_ids)
        return cls(sampling, stops, on_tokens)

    def append(self, token_id: int) -> None:
        """Take the next token. Raises what the constraint raises."""
        self.token_ids.append(token_id)
        if self.matcher is not None and token_id not in self.stop_token_ids:
            self.matcher.accept(token_id)
            self.is_finished |= self.matcher.is_finished

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why it ends after its last token; None if it goes on."""
        if self.is_finished:
            return FinishReason.STOP
        if self.token_ids and self.token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.sampling.max_new_tokens else None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """A request inside the engine. Owned by the engine thread; only `future` is shared with the caller.

        tokens      [0 ............. prompt .............)[ generated ... )
                                 ^ computed_upto: K/V exist before it      ^ num_tokens: their logits are wanted next

    Attributes:
        params: the prompt and its options.
        namespace: who may share its cached tokens.
        future: the result of a prefill, or of a generation if there is one.
        received_s, scheduled_s, prefilled_s: `time.monotonic()` of its arrival, its first admission and its first
            token; None for not yet.
        generation: None for a prefill.
        former: its keys before its adapter was changed; they only explain a miss.
        fetched: blocks of its prompt that came with it; None for none, and once they are used.
        invocation: where an invoked adapter begins; None if `namespace.adapter` computes all of it.
        prompt_tokens: the prompt as the cache knows it, little-endian uint32 bytes.
        num_prompt_tokens: its length in tokens.
        tenant: its caller's tenant.
        arrival: number of requests that came before it.
        lease: its blocks; None while it holds none.
        state: its states; None while it runs not, and of a model that keeps none.
        miss_reason: why it did not reuse more.
        num_nodes: nodes of the cache that were passed to find reused tokens, at the last admission.
        cached_tokens: prompt tokens that it reused; set at each admission until it has computed a token.
        public_tokens: those of them that came from a public prefix.
        loaded_tokens: those of them that were loaded for this admission, by store.
        stored_upto: tokens at its start that were on the device or in stores when it was looked up there.
        has_computed: whether it has computed any token.
        computed_upto: tokens whose K/V exist, reused ones included.
        found_tokens: tokens whose K/V were cached at the last try to admit it, of a model with states also those after
            the last snapshot.
        written_tokens: tokens that it made matchable for others.
        recomputed_tokens: tokens computed again after a pause.
        is_revoked: its namespace was purged after it came, so it publishes nothing.
        is_over: it was answered, or never will be.
    """

    params: PrefillParams
    namespace: Namespace
    future: Future[PrefillResult] | Future[GenerateResult]
    received_s: float
    generation: Generation | None = None
    former: Sequence[PromptKey] = ()
    invocation: Invocation | None = None
    fetched: Fetched | None = None
    prompt_tokens: bytes = field(init=False)
    num_prompt_tokens: int = field(init=False)
    tenant: str = field(init=False)
    arrival: int = 0
    lease: PromptLease | None = None
    state: StateLease | None = None
    miss_reason: MissReason = MissReason.COLD
    num_nodes: int = 0
    cached_tokens: int = 0
    public_tokens: int = 0
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    stored_upto: int = 0
    has_computed: bool = False
    computed_upto: int = 0
    found_tokens: int = 0
    written_tokens: int = 0
    recomputed_tokens: int = 0
    is_revoked: bool = False
    is_over: bool = False
    scheduled_s: float | None = None
    prefilled_s: float | None = None

    def __post_init__(self) -> None:
        self.tenant = self.params.caller.tenant
        prompt, self.num_prompt_tokens = self.params.tokens, self.params.num_tokens
        self.prompt_tokens = prompt if self.invocation is None else self.invocation.marked(prompt)

    @property
    def adapter(self) -> str:
        """Digest of the adapter that computes it, or a part of it; empty for the base model."""
        return self.namespace.adapter if self.invocation is None else self.invocation.digest

    def is_among(self, tenant: str | None, adapter: str | None, salt: str | None) -> bool:
        """Whether it has these names; None matches any."""
        return self.namespace._replace(adapter=self.adapter).is_among(tenant, adapter, salt)

    def close_state(self) -> None:
        """Give back the slots of its states, if it has any."""
        if self.state is not None:
            self.state.close()
            self.state = None

    @property
    def open_lease(self) -> PromptLease:
        """The lease of a running request."""
        assert self.lease is not None, "a running request holds a lease"
        return self.lease

    @property
    def num_tokens(self) -> int:
        """Length of the prompt and the generated tokens together."""
        generation = self.generation
        return self.num_prompt_tokens if generation is None else self.num_prompt_tokens + len(generation.token_ids)

    @property
    def num_expected_tokens(self) -> int:
        """Length that its lease in the tree has at the end if nothing stops it early."""
        if self.generation is None or self.compression is not None:  # which goes on elsewhere
            return self.num_prompt_tokens
        return self.num_prompt_tokens + self.generation.sampling.max_new_tokens

    @property
    def compression(self) -> Compression | None:
        """The rule by which it drops K/V; None for no rule. With one it is never paused: nobody has them any more."""
        return None if self.generation is None else self.generation.sampling.compression

    @property
    def num_private_tokens(self) -> int:
        """Entries of K/V for which it needs private blocks beside those of its prompt."""
        if self.generation is None or self.compression is None:
            return 0
        return self.compression.most_entries(self.num_prompt_tokens, self.generation.sampling.max_new_tokens)

    @property
    def tokens(self) -> bytes:
        """The prompt and the generated tokens as the cache knows them. Complexity: a copy if any was generated."""
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
        """Tokens to compute until the next token is known."""
        return self.num_tokens - self.computed_upto

    @property
    def wants_all_logits(self) -> bool:
        """Whether the logits after each of its next tokens are wanted, to tell how likely the prompt is."""
        generation = self.generation
        if generation is None or generation.sampling.prompt_logprobs is None:
            return False
        return len(generation.prompt_logprobs or ()) < self.num_prompt_tokens - 1

    @property
    def is_decoding(self) -> bool:
        """Whether the last generated token is all that is left to compute."""
        return self.prefilled_s is not None and self.num_left == 1

    @property
    def is_paused(self) -> bool:
        """Whether it had blocks before and gave them back."""
        return self.scheduled_s is not None and self.lease is None

    def is_late(self, now_s: float) -> bool:
        """Whether its deadline has passed. A request that is cancelled after its deadline counts as late."""
        return self.params.deadline_s is not None and self.params.deadline_s <= now_s

    @property
    def rank(self) -> tuple[float, int]:
        """Its place among its tenant's requests, the least first: a point of urgency is worth a second of waiting."""
        return self.received_s - self.params.urgency, self.arrival

    @property
    def usage(self) -> Usage:
        """Its tokens so far."""
        host, disk = (self.loaded_tokens.get(name, 0) for name in ("host", "disk"))
        return Usage(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.cached_tokens,
            computed_tokens=self.num_prompt_tokens - self.cached_tokens,
            written_tokens=self.written_tokens,
            generated_tokens=0 if self.generation is None else len(self.generation.token_ids),
            recomputed_tokens=self.recomputed_tokens,
            public_tokens=self.public_tokens,
            host_tokens=host,
            disk_tokens=disk,
            remote_tokens=sum(self.loaded_tokens.values()) - host - disk,
        )
