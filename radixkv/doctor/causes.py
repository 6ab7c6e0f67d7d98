"""The causes of misses, and how to recognize them by a difference between two prompts."""

from __future__ import annotations

import enum
import re
from typing import NamedTuple

from radixkv.api.explanation import DifferenceKind
from radixkv.api.miss_reason import MissReason
from radixkv.explain.comparison import Comparison
from radixkv.explain.kinds import pattern_of
from radixkv.namespace import Namespace

TEMPLATE_SEGMENT = "template"
"""Name of the parts of a rendered conversation that are not text of a message."""

_MAX_TEMPLATE_TOKENS = 1024  # maximum length of a span that a chat template writes
_MAX_LEFT_TOKENS = 16  # maximum number of tokens that a template leaves in place of reasoning
# Compacting a conversation replaces at least this many tokens, by a span that is at least this many times shorter.
_MIN_COMPACTED_TOKENS = 256
_COMPACTED_FACTOR = 4
_MAX_COMPACTED_SHARE = 0.7  # of the tokens before compacting, if no tokens after the difference are equal
_MAX_CHARS_BEFORE = 400  # characters before the difference that are searched for tags of reasoning and summaries

_TOOLS = re.compile(r"[\"'](?:parameters|input_schema|inputSchema)[\"']\s*:|[\"']type[\"']\s*:\s*[\"']function[\"']")
_NAMES = re.compile(r"[\"']name[\"']\s*:\s*[\"']([^\"']+)[\"']")
_THINKING = re.compile(r"</?(?:think|thinking|thought|reasoning|seed:think)>|\[/?THINK\]|<\|channel\|?>\s*analysis")
_THINKING_BEGIN = re.compile(r"<(think|thinking|thought|reasoning|seed:think)>(?![\s\S]*</\1>)[\s\S]*$")
_TAG = re.compile(r"<\|?[\w/:-]+\|?>|\[/?\w+\]|<</?SYS>>|###? ?\w+:|\A\s*\w+:(?=\s)")
_ROLE = re.compile(r"(?m)^\s*(?:system|developer|user|human|assistant|model|tool|ipython)\b:?")
_SUMMARY = re.compile(
    r"conversation (?:so far|history|summary)|summar(?:y|ize|ised|ized)\b.{0,60}\b(?:conversation|session|history)"
    r"|continued from a previous|compacted|<summary>|(?:earlier|previous) (?:messages|turns) (?:were|have been) ",
    re.IGNORECASE | re.DOTALL,
)


class MissCause(enum.Enum):
    """Why tokens were computed that could have been reused. The values are part of the --json output and are stable."""

    RANDOM_ID = "RANDOM_ID"
    DATE_OR_TIME = "DATE_OR_TIME"
    NUMBER = "NUMBER"
    REORDERED = "REORDERED"
    TOOLS_CHANGED = "TOOLS_CHANGED"
    MESSAGE_INSERTED = "MESSAGE_INSERTED"
    COMPACTED = "COMPACTED"
    THINKING_STRIPPED = "THINKING_STRIPPED"
    RETOKENIZED = "RETOKENIZED"
    TEMPLATE_CHANGED = "TEMPLATE_CHANGED"
    REPLACED = "REPLACED"
    HEAD_CHANGED = "HEAD_CHANGED"
    MIDDLE_CHANGED = "MIDDLE_CHANGED"
    REALIGNED = "REALIGNED"
    SALT_CHANGED = "SALT_CHANGED"
    ADAPTER_CHANGED = "ADAPTER_CHANGED"
    TENANT_CHANGED = "TENANT_CHANGED"
    EVICTED_BY_OWN = "EVICTED_BY_OWN"
    EVICTED_BY_OTHERS = "EVICTED_BY_OTHERS"
    EVICTED = "EVICTED"
    EXPIRED = "EXPIRED"
    NO_WINDOW = "NO_WINDOW"
    NO_STATE = "NO_STATE"
    NOT_LOADED = "NOT_LOADED"
    READ_DISABLED = "READ_DISABLED"


CAUSE_OF_REASON = {
    MissReason.EVICTED: MissCause.EVICTED,
    MissReason.EXPIRED: MissCause.EXPIRED,
    MissReason.NO_WINDOW: MissCause.NO_WINDOW,
    MissReason.NO_STATE: MissCause.NO_STATE,
    MissReason.NOT_LOADED: MissCause.NOT_LOADED,
    MissReason.READ_DISABLED: MissCause.READ_DISABLED,
    MissReason.ADAPTER_CHANGED: MissCause.ADAPTER_CHANGED,
}
"""Causes that the cache reports itself, without a comparison of prompts."""


def cause_of_namespace(namespace: Namespace, other: Namespace) -> MissCause:
    """Return why tokens that are cached in another namespace are not reused."""
    if other.tenant != namespace.tenant:
        return MissCause.TENANT_CHANGED
    if (other.model, other.adapter) != (namespace.model, namespace.adapter):
        return MissCause.ADAPTER_CHANGED
    return MissCause.SALT_CHANGED


class Sides(NamedTuple):
    """The properties of two prompts by which the cause of a difference between them is recognized.

    Attributes:
        prompt_text, branch_text: the beginnings of the differing spans; empty without a tokenizer.
        segment: name of the segment that contains the difference in the prompt; empty if it is not known.
        is_same_session: whether both prompts are of one conversation.
        num_prompt_tokens, num_branch_tokens: lengths of both prompts.
    """

    prompt_text: str = ""
    branch_text: str = ""
    segment: str = ""
    is_same_session: bool = False
    num_prompt_tokens: int = 0
    num_branch_tokens: int = 0

    @property
    def text(self) -> str:
        """The longer of both texts."""
        return max(self.prompt_text, self.branch_text, key=len)


_CAUSE_OF_KIND = {
    DifferenceKind.RANDOM_ID: MissCause.RANDOM_ID,
    DifferenceKind.DATE_OR_TIME: MissCause.DATE_OR_TIME,
    DifferenceKind.NUMBER: MissCause.NUMBER,
    DifferenceKind.FIRST_TOKEN: MissCause.TEMPLATE_CHANGED,
}


def cause_of(comparison: Comparison, sides: Sides) -> tuple[MissCause, str] | None:
    """Return the cause of a difference and its pattern; None if the prompts are probably unrelated.

    A passage that only one of the prompts has is the same cause, whichever prompt was sent first.

    Args:
        comparison: what differs.
        sides: the two prompts.
    """
    kind, realignment, texts = comparison
    if kind in _CAUSE_OF_KIND:
        return _CAUSE_OF_KIND[kind], pattern_of(kind, texts)
    if _is_template(comparison, sides):
        return MissCause.TEMPLATE_CHANGED, ""
    if kind is DifferenceKind.RETOKENIZED:
        return MissCause.RETOKENIZED, ""
    if kind is DifferenceKind.REORDERED:
        return MissCause.REORDERED, _order_pattern(comparison, sides) or pattern_of(kind, texts)
    if _is_compacted(comparison, sides):
        return MissCause.COMPACTED, ""
    if realignment is None:
        return None
    if sides.segment == "tools" or _TOOLS.search(sides.text):
        return MissCause.TOOLS_CHANGED, ""
    if kind in (DifferenceKind.INSERTED, DifferenceKind.REMOVED):
        return (MissCause.THINKING_STRIPPED if _is_thinking(comparison, sides) else MissCause.MESSAGE_INSERTED), ""
    if min(realignment.prompt_span, realignment.branch_span) <= _MAX_LEFT_TOKENS and _THINKING.search(sides.text):
        return MissCause.THINKING_STRIPPED, ""
    is_mostly_equal = max(realignment.prompt_span, realignment.branch_span) <= realignment.equal_tokens
    return (MissCause.REPLACED, "") if is_mostly_equal else None


def _is_template(comparison: Comparison, sides: Sides) -> bool:
    """Whether the differing spans are written by a chat template, not by the sender: special tokens, tags and roles."""
    realignment, texts = comparison.realignment, comparison.texts
    if realignment is None or texts is None:
        return False
    if sides.segment == TEMPLATE_SEGMENT:
        return True
    if texts.is_equal:
        # No text differs. If the spans have no text without their context either, they are special tokens.
        return not sides.prompt_text and not sides.branch_text
    if max(realignment.prompt_span, realignment.branch_span) > _MAX_TEMPLATE_TOKENS:
        return False
    prompt_words, branch_words = (_whole_words(*side) for side in texts)
    has_tag = bool(_TAG.search(prompt_words) or _TAG.search(branch_words))
    return has_tag and _strip_markup(prompt_words) == _strip_markup(branch_words)


def _whole_words(text: str, start: int, end: int) -> str:
    """Return a range of a text, and the rest of the words at its ends."""
    while start > 0 and not text[start - 1].isspace():
        start -= 1
    while end < len(text) and not text[end].isspace():
        end += 1
    return text[start:end]


def _strip_markup(text: str) -> str:
    """Return a text without tags, roles and white space."""
    return "".join(_ROLE.sub(" ", _TAG.sub("\n", text)).split())


def _order_pattern(comparison: Comparison, sides: Sides) -> str:
    """Return what has another order, tools or the keys in them; empty if the differing spans are no tools."""
    if not (_TOOLS.search(sides.text) or sides.segment == "tools"):
        return ""
    prompt_text, branch_text = sides.prompt_text, sides.branch_text
    if comparison.texts is not None:  # longer texts, which begin before the difference
        prompt_text, branch_text = comparison.texts.prompt.text, comparison.texts.branch.text
    has_same_names = _NAMES.findall(prompt_text) == _NAMES.findall(branch_text)
    return "keys of JSON objects" if has_same_names else "tools"


def _is_compacted(comparison: Comparison, sides: Sides) -> bool:
    """Whether one prompt has a summary instead of messages of the other, or has dropped them."""
    if comparison.kind not in (DifferenceKind.REPLACED, DifferenceKind.REMOVED, DifferenceKind.UNCLASSIFIED):
        return False
    if comparison.kind is DifferenceKind.REMOVED and _is_thinking(comparison, sides):
        return False
    prompt_has_summary = bool(_SUMMARY.search(sides.prompt_text))
    branch_has_summary = bool(_SUMMARY.search(sides.branch_text))
    continues_branch = sides.is_same_session or prompt_has_summary
    realignment = comparison.realignment
    if realignment is None:
        return continues_branch and sides.num_prompt_tokens < _MAX_COMPACTED_SHARE * sides.num_branch_tokens
    if prompt_has_summary != branch_has_summary or _is_after(_SUMMARY, comparison):
        return True
    min_span = max(_MIN_COMPACTED_TOKENS, _COMPACTED_FACTOR * realignment.prompt_span)
    if realignment.branch_span < min_span:
        return False
    return continues_branch and not _TOOLS.search(sides.branch_text)


def _is_thinking(comparison: Comparison, sides: Sides) -> bool:
    return bool(_THINKING.search(sides.text)) or _is_after(_THINKING_BEGIN, comparison)


def _is_after(pattern: re.Pattern[str], comparison: Comparison) -> bool:
    """Whether the difference follows a match of the pattern."""
    if comparison.texts is None:
        return False
    text, start, _ = comparison.texts.prompt
    return pattern.search(text[max(0, start - _MAX_CHARS_BEFORE) : start]) is not None
