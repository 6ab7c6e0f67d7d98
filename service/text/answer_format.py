"""How a model writes its answers: reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixkv.service.text.reasoning import ReasoningFormat, ReasoningText
from radixkv.service.text.tool_calls import ToolCall, ToolCallText
from radixkv.service.text.tool_formats import ToolFormat


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes its answers.

    Attributes:
        tool_format: the format of tool calls; None if it is not known.
        reasoning: the format of reasoning; None if the model does not reason, or its format is not known.
        tags: the special tokens that texts of these formats contain, with their ids.
    """

    tool_format: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    tags: Mapping[str, int] = field(default_factory=dict)

    @property
    def call_begin(self) -> str:
        """A special token or text that begins a call; empty if calls have no tag or their format is unknown."""
        return "" if self.tool_format is None else self.first_tag(self.tool_format.begin)

    def first_tag(self, text: str) -> str:
        """Return the special token with which a text begins, or else the first line of the text."""
        return next((each for each in self.tags if text.startswith(each)), text.partition("\n")[0])


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of an answer: reasoning."""

    text: str


AnswerPart = str | Reasoning | ToolCall


class AnswerParts:
    """Separates a completion, which arrives in pieces, into its parts.

    How the completion is divided into pieces does not change the concatenated parts.

    Args:
        reasoning: the format of reasoning; None if completions have no reasoning.
        is_open: whether the prompt ends with the beginning of reasoning.
        tools: the format of tool calls; None if there are no calls.
        functions: the `tools` of a request that may be called, each with `name` and `parameters`, a JSON schema.
        is_parallel: whether the answer may have several calls. Otherwise, those after the first one are left out.

    Attributes:
        num_calls: number of calls so far.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        *,
        is_open: bool = False,
        tools: ToolFormat | None = None,
        functions: Sequence[Mapping[str, Any]] = (),
        is_parallel: bool = True,
    ) -> None:
        self.num_calls = 0
        self._reasoning = None if reasoning is None else ReasoningText(reasoning, is_open=is_open)
        schemas = {each["name"]: each.get("parameters") or {} for each in functions}
        self._calls = None if tools is None else ToolCallText(tools, schemas)
        self._is_parallel = is_parallel

    @property
    def is_reasoning(self) -> bool:
        """Whether the last character belongs to reasoning."""
        return self._reasoning is not None and self._reasoning.is_reasoning

    def put(self, piece: str, *, is_last: bool = False) -> list[AnswerPart]:
        """Add a piece. Returns new parts in their order: new reasoning and text, and the calls that are complete now.

        Args:
            piece: the next piece.
            is_last: whether it is the last one.
        """
        parts: list[AnswerPart] = []
        text = piece
        if self._reasoning is not None:
            reasoning, text = self._reasoning.put(piece)
            if is_last:
                last_reasoning, last_text = self._reasoning.end()
                reasoning, text = reasoning + last_reasoning, text + last_text
            if reasoning:
                parts.append(Reasoning(reasoning))
        if self._calls is None:
            return [*parts, text] if text else parts
        new_parts = self._calls.put(text)
        if is_last:
            new_parts += self._calls.end()
        for each in new_parts:
            if isinstance(each, ToolCall):
                if self.num_calls and not self._is_parallel:
                    continue  # only the first call of the answer counts
                self.num_calls += 1
            parts.append(each)
        return parts
