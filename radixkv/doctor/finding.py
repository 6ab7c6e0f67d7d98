"""What one prompt lost, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from radixkv.doctor.causes import MissCause
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES


class GroupKey(NamedTuple):
    """What the findings of a group have in common.

    Attributes:
        cause: why the tokens were not reused.
        place: the segment that has the difference, or a range of positions; empty if the cause is not a difference.
        pattern: pattern of the difference, such as "16 hexadecimal digits"; empty if it has none.
    """

    cause: MissCause
    place: str = ""
    pattern: str = ""


class Replacement(NamedTuple):
    """Tokens of a prompt that make it equal to an earlier one.

    Attributes:
        start, end: the range that is replaced.
        tokens: little-endian uint32 bytes to replace it with.
    """

    start: int
    end: int
    tokens: bytes


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a difference.

    Attributes:
        token_ids: at most 16 tokens, from the first one that differs.
        num_different: number of differing tokens at the beginning of `token_ids`.
        text: text of these tokens; empty without a tokenizer.
        text_after: text of the other tokens in `token_ids`.
        span: length of the whole difference in tokens; None if both sides are not equal again.
    """

    token_ids: tuple[int, ...]
    num_different: int
    text: str
    text_after: str
    span: int | None


@dataclass(frozen=True, slots=True)
class Sample:
    """Both sides of a difference.

    Attributes:
        before_ids: the tokens before the difference, at most 8.
        text_before: text of these tokens.
        prompt: the prompt that lost tokens.
        earlier: the earlier prompt that it was compared with.
        where, earlier_where: places of both prompts in the log; empty for the prompts of a server.
    """

    before_ids: tuple[int, ...]
    text_before: str
    prompt: Side
    earlier: Side
    where: str
    earlier_where: str


@dataclass(frozen=True, slots=True)
class Finding:
    """Tokens that a prompt lost for one cause.

    Attributes:
        key: the group of the finding.
        position: position in the prompt at which it diverges from the earlier one.
        lost_tokens: tokens that were computed and would have been reused without the cause.
        segment: name of the segment that contains the position; empty if it is not known.
        replacements: replacements that remove the cause; empty if there are none.
        namespace: if the cause is that the tokens are cached in another namespace, that namespace.
        sample: both sides; None if the cause has no sides.
        is_bound: whether `lost_tokens` is only an upper bound.
    """

    key: GroupKey
    position: int
    lost_tokens: int
    segment: str = ""
    replacements: tuple[Replacement, ...] = ()
    namespace: Namespace | None = None
    sample: Sample | None = None
    is_bound: bool = False

    @property
    def is_fixable(self) -> bool:
        """Whether the cause can be removed from the log."""
        return bool(self.replacements) or self.namespace is not None


def apply_replacements(tokens: bytes, replacements: tuple[Replacement, ...]) -> bytes:
    """Return tokens with their replacements. The ranges of the replacements must be in order.

    >>> apply_replacements(bytes(8), (Replacement(1, 2, b"abcdefgh"),))
    b'\\x00\\x00\\x00\\x00abcdefgh'
    """
    parts, end = [], 0
    for each in replacements:
        parts += [tokens[end : TOKEN_BYTES * each.start], each.tokens]
        end = TOKEN_BYTES * each.end
    return b"".join((*parts, tokens[end:]))


def place_of(position: int, segment: str) -> str:
    """Return the place of a position in the key of a group: its segment without numbers, or a range of positions.

    >>> place_of(37, ""), place_of(0, ""), place_of(5000, "message 7 (tool)")
    ('tokens 16 to 255', 'token 0', 'message (tool)')
    """
    if segment:
        return " ".join(each for each in segment.split() if not each.isdigit())
    if not position:
        return "token 0"
    low = 1
    while low * 16 <= position:
        low *= 16
    return f"tokens {low} to {low * 16 - 1}"
