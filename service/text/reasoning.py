"""The reasoning of a model before its answer, such as the text between `<think>` and `</think>`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model writes its reasoning.

    Attributes:
        name: name of the format in the configuration.
        begin: the text before the reasoning. A chat template may write it at the end of the prompt.
        end: the text after the reasoning.
    """

    name: str
    begin: str
    end: str


_FORMATS = (
    ReasoningFormat("think", "<think>", "</think>"),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
    ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
    ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
)
REASONING_FORMATS = {each.name: each for each in _FORMATS}


def reasoning_format_of(template: str) -> ReasoningFormat | None:
    """Return the format in which models with this chat template write reasoning; None if it is not known."""
    return next((each for each in _FORMATS if each.end in template), None)


class ReasoningText:
    """Separates reasoning at the beginning of a completion, which arrives in pieces, from the answer.

    White space around the reasoning is left out.

    >>> text = ReasoningText(REASONING_FORMATS["think"])
    >>> text.put("<think>\\nHm. </th"), text.put("ink>\\n\\nYes")
    (('Hm.', ''), ('', 'Yes'))

    Args:
        form: the format of reasoning.
        is_open: whether the prompt ends with the beginning of reasoning.

    Attributes:
        is_reasoning: whether the last character belongs to reasoning.
    """

    def __init__(self, form: ReasoningFormat, *, is_open: bool = False) -> None:
        self.is_reasoning = is_open
        self._may_repeat = is_open  # some models repeat the beginning of reasoning with which the prompt ends
        self._form = form
        self._held = ""
        self._is_start = True  # whether only white space of the reasoning has arrived
        self._has_ended = False  # whether the reasoning has ended, or there is none
        self._is_between = False  # whether the reasoning has ended, and only white space has arrived after it

    def put(self, piece: str) -> tuple[str, str]:
        """Add a piece. Returns the reasoning and the part of the answer that are complete."""
        if self._has_ended and not self._is_between:
            return "", piece
        self._held += piece
        if not self.is_reasoning and not self._has_ended and not self._read_begin():
            return "", self._take_answer()
        reasoning = self._take_reasoning() if self.is_reasoning else ""
        return reasoning, self._take_answer() if self._has_ended else ""

    def end(self) -> tuple[str, str]:
        """End the completion after its last piece: return the reasoning and the answer that were held back."""
        held, self._held = self._held, ""
        if not self.is_reasoning:
            return "", "" if self._is_between else held
        if self._may_repeat and held == self._form.begin:
            return "", ""
        return held.rstrip(), ""

    def _read_begin(self) -> bool:
        """Read the beginning of the reasoning, and return whether there is any."""
        text = self._held.lstrip()
        if text.startswith(self._form.begin):
            self._held = text[len(self._form.begin) :]
            self.is_reasoning = True
        elif not self._form.begin.startswith(text):
            self._has_ended = True
        return self.is_reasoning

    def _take_reasoning(self) -> str:
        if self._is_start:
            self._held = self._held.lstrip()
            if self._may_repeat and self._form.begin.startswith(self._held):
                return ""
            if self._may_repeat and self._held.startswith(self._form.begin):
                self._held = self._held[len(self._form.begin) :].lstrip()
                self._may_repeat = False
            self._is_start = not self._held

        end = self._form.end
        end_start = self._held.find(end)
        if end_start >= 0:
            text = self._held[:end_start].rstrip()
            self._held = self._held[end_start + len(end) :]
            self.is_reasoning, self._has_ended, self._is_between = False, True, True
            return text

        # Hold back the last characters if `end` may begin with them, and white space, which may come before `end`.
        num_end_chars = next((n for n in range(len(end) - 1, 0, -1) if self._held.endswith(end[:n])), 0)
        text = self._held[: len(self._held) - num_end_chars].rstrip()
        self._held = self._held[len(text) :]
        return text

    def _take_answer(self) -> str:
        if not self._has_ended:
            return ""
        text = self._held.lstrip() if self._is_between else self._held
        self._is_between = self._is_between and not text
        self._held = ""
        return text
