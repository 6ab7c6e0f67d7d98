"""Tool calls in the text of a completion."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BEGIN, _END = "<tool_call>", "</tool_call>"
# Templates with these use the same tags, but not JSON.
_OTHER_FORMS = ("<function=", "<arg_key>")
_ARGUMENTS = ("arguments", "parameters")
# The white space that `tojson` of chat templates writes, so that a call is rendered as it was generated.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        name: name of the tool.
        arguments: a JSON object.
    """

    name: str
    arguments: Mapping[str, Any]


def has_json_tool_calls(template: str) -> bool:
    """Return whether models with this chat template write calls as JSON between `<tool_call>` and `</tool_call>`.

    Those of Hermes, Qwen 2.5, Qwen 3 and SmolLM 3 do.
    """
    return _BEGIN in template and not any(each in template for each in _OTHER_FORMS)


def tool_call_grammar(tools: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> str:
    """Return a grammar in Lark's syntax of completions that consist of calls.

    Args:
        tools: the functions that may be called, each with `name` and `parameters`, a JSON schema.
        is_parallel: whether there may be several calls.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool["name"]}, "arguments": tool.get("parameters") or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema = json.dumps({**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "x-guidance": _SPACING})
    further = ' ("\\n" call)*' if is_parallel else ""
    return f'start: call{further}\ncall: "{_BEGIN}\\n" arguments "\\n{_END}"\narguments: %json {schema}\n'


class ToolCallText:
    """Separates the text of a completion, which arrives in pieces, from its calls.

    A call is JSON between the tags: an object with `name` and `arguments`, or a list of such objects. Anything else
    between the tags is text.

    >>> text = ToolCallText()
    >>> text.put('Let me see. <tool_call>{"name": "clock", "argu'), text.put('ments": {}}</tool_call>')
    (('Let me see. ', []), ('', [ToolCall(name='clock', arguments={})]))
    """

    def __init__(self) -> None:
        self._held = ""

    def put(self, piece: str) -> tuple[str, list[ToolCall]]:
        """Add a piece. Returns the text that belongs to no call, and the calls that are complete."""
        self._held += piece
        texts: list[str] = []
        calls: list[ToolCall] = []
        while (begin := self._held.find(_BEGIN)) >= 0:
            end = self._held.find(_END, begin)
            if end < 0:
                texts.append(self._held[:begin])
                self._held = self._held[begin:]
                return "".join(texts), calls
            found = _calls_in(self._held[begin + len(_BEGIN) : end])
            after = end + len(_END)
            if found:
                texts.append(self._held[:begin].rstrip("\n") if not calls else self._held[:begin].strip())
                calls += found
            else:
                texts.append(self._held[:after])
            self._held = self._held[after:]
        num_kept = next((n for n in range(len(_BEGIN) - 1, 0, -1) if self._held.endswith(_BEGIN[:n])), 0)
        cut = len(self._held) - num_kept
        texts.append(self._held[:cut])
        self._held = self._held[cut:]
        return "".join(texts), calls

    def end(self) -> str:
        """Return the text that was held back, after the last piece."""
        held, self._held = self._held, ""
        return held


def _calls_in(text: str) -> list[ToolCall]:
    """Return the calls in a text; none if it is something else."""
    try:
        parsed = json.loads(text)
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()  # no infinite numbers, no lone surrogates
    except (ValueError, RecursionError):
        return []
    calls = list(_calls_of(parsed if isinstance(parsed, list) else [parsed]))
    return [] if None in calls else [each for each in calls if each is not None]


def _calls_of(values: Sequence[object]) -> Iterator[ToolCall | None]:
    for value in values:
        call = value if isinstance(value, dict) else {}
        arguments: Any = next((call[name] for name in _ARGUMENTS if name in call), {})
        is_call = isinstance(call.get("name"), str) and isinstance(arguments, dict)
        yield ToolCall(call["name"], arguments) if is_call else None
