"""Where a prompt diverges from what is cached in its namespace, what differs there, and what that costs."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.api.miss_reason import MissReason
from radixkv.errors import InvalidRequest
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES

MAX_SEGMENTS_OF_PROMPT = 1024


class DifferenceKind(enum.Enum):
    """What differs between a prompt and a cached branch. Values are the protocol's names."""

    UNCLASSIFIED = "UNCLASSIFIED"
    RANDOM_ID = "RANDOM_ID"
    DATE_OR_TIME = "DATE_OR_TIME"
    NUMBER = "NUMBER"
    INSERTED = "INSERTED"
    REMOVED = "REMOVED"
    REORDERED = "REORDERED"
    RETOKENIZED = "RETOKENIZED"
    FIRST_TOKEN = "FIRST_TOKEN"
    REPLACED = "REPLACED"


@dataclass(frozen=True, slots=True)
class CachedBranch:
    """Cached tokens of one namespace that continue the shared part of a prompt differently.

    Attributes:
        runs: little-endian uint32 tokens of the nodes of the branch, in order. The nodes' own bytes, not copies.
        start_byte: position in the first run at which the branch begins.
        idle_s: seconds since a request last used its first node.
    """

    runs: tuple[bytes, ...]
    start_byte: int
    idle_s: float

    def tokens(self, max_tokens: int) -> bytes:
        """Return the first `max_tokens` tokens of the branch. Complexity: copies the runs up to the last of them."""
        end_byte = self.start_byte + max_tokens * TOKEN_BYTES
        copied_runs, num_bytes = [], 0
        for run in self.runs:
            copied_runs.append(run[: end_byte - num_bytes])
            num_bytes += len(copied_runs[-1])
            if num_bytes >= end_byte:
                break
        return b"".join(copied_runs)[self.start_byte :]


@dataclass(frozen=True, slots=True)
class NamedBranch:
    """Cached tokens from the beginning of a prompt on, with the names of their owner.

    Attributes:
        namespace: the namespace in which they are cached.
        session_id: the only session that has used the end of the branch; empty if there is none.
        branch: the tokens. Those that an invoked adapter computed are marked; see `radixkv.invocation`.
    """

    namespace: Namespace
    session_id: str
    branch: CachedBranch


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt diverges from the cached branches of its namespace.

    Attributes:
        left_at: number of tokens that the prompt shares with the branches; without branches, with everything cached.
        branches: branches that share exactly these tokens with the prompt, the most recently used first; empty if the
            prompt continues what is cached, or nothing else is cached there.
        num_examined_nodes: nodes that were examined, other than those on the path of the prompt.
    """

    left_at: int
    branches: tuple[CachedBranch, ...] = ()
    num_examined_nodes: int = 0


@dataclass(frozen=True, slots=True)
class LookUp:
    """What the engine knows of a prompt without computing it.

    Attributes:
        tokens: the prompt as the cache knows it, little-endian uint32 bytes.
        cached_tokens: tokens that a prefill would reuse now.
        miss_reason: why a prefill would not reuse the other tokens.
        divergence: where the prompt diverges from the cached branches.
        token_s: seconds that recent requests of the tenant took per computed token; None without measurements.
    """

    tokens: bytes
    cached_tokens: int
    miss_reason: MissReason
    divergence: Divergence
    token_s: float | None


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The beginning of one side of a difference.

    Attributes:
        token_ids: at most 16 tokens from the position at which the sides differ.
        num_different: how many of them belong to the differing span; the others are equal on both sides.
        different_text: text of the differing span, as far as it is in the excerpt; empty without a tokenizer.
        equal_text: text of the tokens after the differing span; empty without a tokenizer.
    """

    token_ids: tuple[int, ...]
    num_different: int
    different_text: str = ""
    equal_text: str = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs between a prompt and the cached branch that it resembles most.

    Attributes:
        kind: the kind of difference.
        before_ids, before_text: up to 8 shared tokens before the difference, and their text.
        prompt, branch: how the two sides continue.
        prompt_span_tokens, branch_span_tokens: length of the differing span on either side, after which the sides are
            equal again; None if no such place was found.
        lost_tokens: tokens that are equal after the spans: the prompt would have reused them if the spans were equal.
        lost_s: seconds to compute them; None without measurements.
        idle_s: seconds since a request last used the branch.
    """

    kind: DifferenceKind
    before_ids: tuple[int, ...]
    before_text: str
    prompt: Excerpt
    branch: Excerpt
    prompt_span_tokens: int | None
    branch_span_tokens: int | None
    lost_tokens: int
    lost_s: float | None
    idle_s: float


@dataclass(frozen=True, slots=True)
class PromptSegment:
    """A part of a prompt that its caller has named, such as its system prompt.

    Attributes:
        name: any text.
        end: the position after its last token. Its first token is at the `end` of the previous segment.
    """

    name: str
    end: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a prompt is not reused further than it is.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: tokens that a prefill would reuse now.
        miss_reason: why a prefill would not reuse the other tokens.
        left_at: position at which the prompt diverges from the cached branches; see `Divergence.left_at`.
        segment: name of the segment that has this position; empty without one.
        computed_tokens: tokens that are computed: those after the first `min(cached_tokens, left_at)`, at least one.
        computed_s: seconds to compute them; None without measurements.
        difference: what differs at that position; None if nothing else is cached there.
    """

    prompt_tokens: int
    cached_tokens: int
    miss_reason: MissReason
    left_at: int
    segment: str
    computed_tokens: int
    computed_s: float | None
    difference: Difference | None


def require_segments(segments: Sequence[PromptSegment]) -> None:
    """Check the segments of a prompt.

    Raises:
        InvalidRequest: there are too many, or they are not in order.
    """
    if len(segments) > MAX_SEGMENTS_OF_PROMPT:
        raise InvalidRequest(f"segments: expected at most {MAX_SEGMENTS_OF_PROMPT}, got {len(segments)}")
    previous_end = 0
    for index, segment in enumerate(segments):
        if segment.end < previous_end:
            raise InvalidRequest(f"segments[{index}].end_token: expected at least {previous_end}, got {segment.end}")
        previous_end = segment.end


def segment_at(segments: Sequence[PromptSegment], position: int) -> str:
    """Return the name of the segment that has a position; empty if none has it.

    >>> segment_at([PromptSegment("system", 10), PromptSegment("tools", 30)], 10)
    'tools'
    """
    return next((each.name for each in segments if each.end > position), "")
