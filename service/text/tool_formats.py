"""The formats in which models write tool calls, each described by the text of a call.

A format has one or more variants. The first one is the text of a call that the server forces; all of them are
recognized in what a model writes. A variant has one of these placeholders:

| placeholder | is replaced by |
|---|---|
| `{call}` | a JSON object with `name` and the arguments; when it is read, also a list of such objects |
| `{calls}` | a JSON list of such objects |
| `{name}`, `{arguments}` | the name, and the arguments: a JSON object, or what `argument` describes |
| `{python}` | a list of calls in Python's notation, such as `[clock(), weather(city="Rome")]` |

`{id}` is replaced by an identifier before the arguments, which the server ignores. In what a model writes, the white
space next to a placeholder, and in place of a line break, may differ from the variant.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

AUTOMATIC = "auto"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls.

    Attributes:
        name: its name in the configuration.
        variants: the text of a call in each variant; see the placeholders above.
        signs: groups of texts; a chat template that contains all texts of one group uses this format.
        tokens: tokens that the tokenizer of such a model must have.
        separator: the text between two calls.
        prefix: the text before the first call.
        suffix: the text after the last call.
        argument: the text of an argument, with `{key}` and `{value}`, in formats whose arguments are not a JSON object.
            Values are JSON, but text is written without quotes.
        arguments_key: the key of the arguments in `{call}`.
        quote: the text that encloses strings in `{arguments}` instead of quotes, in formats whose keys have no quotes.
    """

    name: str
    variants: tuple[str, ...]
    signs: tuple[tuple[str, ...], ...]
    tokens: tuple[str, ...] = ()
    separator: str = "\n"
    prefix: str = ""
    suffix: str = ""
    argument: str = ""
    arguments_key: str = "arguments"
    quote: str = ""

    @property
    def begin(self) -> str:
        """The text with which a call begins, before the first placeholder; empty if a call begins with a placeholder.

        >>> [TOOL_FORMATS[name].begin for name in ("hermes", "mistral", "pythonic")]
        ['<tool_call>', '[TOOL_CALLS]', '']
        """
        return (self.prefix + self.variants[0]).partition("{")[0].strip()

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str | None:
        """Return the text of calls, each with `name` and `arguments`; None if calls are not JSON objects with both."""
        objects = [
            json.dumps({"name": each["name"], self.arguments_key: each["arguments"]}, ensure_ascii=False)
            for each in calls
        ]
        variant = self.variants[0]
        if "{calls}" in variant:
            return variant.replace("{calls}", f"[{', '.join(objects)}]")
        if "{call}" in variant:
            return self.separator.join(variant.replace("{call}", each) for each in objects)
        return None


# The tags of DeepSeek's models.
_CALLS_BEGIN, _CALLS_END, _CALL_BEGIN, _SEPARATOR, _CALL_END = (
    f"<\uff5ctool▁{each}\uff5c>" for each in ("calls▁begin", "calls▁end", "call▁begin", "sep", "call▁end")
)
# The variants of Mistral's models.
_MISTRAL = (
    "[TOOL_CALLS]{calls}",
    "[TOOL_CALLS]{name}[ARGS]{arguments}",
    "[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{arguments}",
    "[TOOL_CALLS]{name}{arguments}",
)
# In the order in which they are tried: a format whose signs contain those of another format comes before that one.
_FORMATS = (
    ToolFormat(
        "deepseek_v3",
        (f"{_CALL_BEGIN}function{_SEPARATOR}{{name}}\n```json\n{{arguments}}\n```{_CALL_END}",),
        ((_CALL_BEGIN, "```json"),),
        prefix=_CALLS_BEGIN,
        suffix=_CALLS_END,
    ),
    ToolFormat(
        "deepseek_v31",
        (f"{_CALL_BEGIN}{{name}}{_SEPARATOR}{{arguments}}{_CALL_END}",),
        ((_CALL_BEGIN,),),
        separator="",
        prefix=_CALLS_BEGIN,
        suffix=_CALLS_END,
    ),
    ToolFormat(
        "kimi_k2",
        ("<|tool_call_begin|>functions.{name}:{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",),
        (("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),),
        separator="",
        prefix="<|tool_calls_section_begin|>",
        suffix="<|tool_calls_section_end|>",
    ),
    ToolFormat(
        "glm4",
        ("<tool_call>{name}\n{arguments}</tool_call>",),
        (("<tool_call>", "<arg_key>"),),
        argument="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    ToolFormat(
        "qwen3_coder",
        ("<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",),
        (("<tool_call>", "<function="),),
        argument="<parameter={key}>\n{value}\n</parameter>\n",
    ),
    ToolFormat(
        "seed_oss",
        ("<seed:tool_call>\n<function={name}>\n{arguments}</function>\n</seed:tool_call>",),
        (("<seed:tool_call>",),),
        argument="<parameter={key}>{value}</parameter>\n",
    ),
    ToolFormat("nemotron", ("<TOOLCALL>{calls}</TOOLCALL>",), (("<TOOLCALL>",),), separator=""),
    ToolFormat(
        "lfm2",
        ("<|tool_call_start|>{python}<|tool_call_end|>",),
        (("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        separator="",
    ),
    ToolFormat("hermes", ("<tool_call>\n{call}\n</tool_call>",), (("<tool_call>",),)),
    ToolFormat("mistral_args", (_MISTRAL[1], *_MISTRAL), (("[TOOL_CALLS]", "[ARGS]"),), separator=""),
    ToolFormat("mistral", _MISTRAL, (("[TOOL_CALLS]",),), separator=""),
    ToolFormat(
        "phi4_mini",
        ("<|tool_call|>{calls}<|/tool_call|>", "<|tool_call|>{calls}"),
        (("<|tool_call|>",), ("<|tool|>", "<|/tool|>")),
        tokens=("<|tool_call|>",),
        separator="",
    ),
    ToolFormat(
        "gemma4",
        ("<|tool_call>call:{name}{arguments}<tool_call|>",),
        (("<|tool_call>call:",),),
        separator="",
        quote='<|"|>',
    ),
    ToolFormat(
        "functiongemma",
        ("<start_function_call>call:{name}{arguments}<end_function_call>",),
        (("<start_function_call>",),),
        separator="",
        quote="<escape>",
    ),
    ToolFormat("functools", ("functools{calls}",), (("functools[",),), separator=""),
    ToolFormat(
        "llama3_json",
        ("{call}", "<|python_tag|>{call}"),
        (('{"name": ', '"parameters": ', "<|start_header_id|>"), ('{"name": ', '"parameters": ', "<|python_tag|>")),
        separator="; ",
        arguments_key="parameters",
    ),
    ToolFormat("pythonic", ("{python}",), (("[func_name1(params_name1=",),), separator=""),
)
TOOL_FORMATS = {each.name: each for each in _FORMATS}


def tool_format_of(template: str, tokens: Collection[str]) -> ToolFormat | None:
    """Return the format in which models with this chat template write tool calls; None if it is not known.

    Args:
        template: the chat template.
        tokens: the tokenizer's added tokens.
    """
    for each in _FORMATS:
        has_tokens = all(token in tokens for token in each.tokens)
        has_signs = any(all(sign in template for sign in group) for group in each.signs)
        if has_tokens and has_signs:
            return each
    return None
