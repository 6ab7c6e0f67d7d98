"""Grammars of answers with tool calls, in llguidance's Lark syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from radixkv.service.text.answer_format import AnswerFormat

# The white space that `tojson` of chat templates writes, so that a call is rendered as it was generated.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_TEXT = "/(?s:.*)/"
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_FREE_KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"
# Text whose first character, apart from white space, is no bracket: calls without a tag begin with a bracket.
_TEXT_WITHOUT_CALL = r"/\s*[^\s{\[](?s:.*)/"
_DEFINITIONS = ("$defs", "definitions")
# Keys of schemas that do not constrain a value. They would take most of the maximum length of a grammar.
_ANNOTATIONS = {"title", "description", "examples", "default", "deprecated", "readOnly", "writeOnly", "$comment"}
# Keys of schemas whose value is an object with a schema for each name.
_KEYS_OF_NAMED_SCHEMAS = {"properties", "patternProperties", "dependentSchemas", *_DEFINITIONS}
# Keys of schemas whose value is data and contains no schema.
_KEYS_OF_VALUES = {"enum", "const"}


def forced_calls(
    form: AnswerFormat, functions: Sequence[Mapping[str, Any]], *, is_parallel: bool, is_open: bool | None = None
) -> str:
    """Return the grammar of answers that consist of calls, after reasoning if there is any.

    Args:
        form: the format of answers; `form.tool_format` is not None.
        functions: the functions that may be called, each with `name` and `parameters`, a JSON schema.
        is_parallel: whether there may be several calls.
        is_open: whether the prompt ends with the beginning of reasoning; None if no reasoning may follow.
    """
    rules = _Rules(form)
    reasoning = rules.reasoning(is_open=is_open)
    assert form.tool_format is not None
    calls = rules.calls(form.tool_format.variants[0], form.tool_format.prefix, functions, is_parallel=is_parallel)
    rules.add("start", f"{reasoning} {calls}")
    return rules.text()


def calls_or_answer(
    form: AnswerFormat,
    functions: Sequence[Mapping[str, Any]],
    answer: str,
    *,
    is_parallel: bool,
    is_open: bool | None = None,
) -> str:
    """Return the grammar of answers that consist of calls or match an expression, after reasoning if there is any.

    Args:
        form: the format of answers.
        functions: as for `forced_calls`; there may be none.
        answer: an expression in llguidance's Lark syntax.
        is_parallel: whether there may be several calls.
        is_open: as for `forced_calls`.
    """
    rules = _Rules(form)
    reasoning = rules.reasoning(is_open=is_open)
    tools = form.tool_format
    if functions:
        assert tools is not None
        answer += f" | {rules.calls(tools.variants[0], tools.prefix, functions, is_parallel=is_parallel)}"
    rules.add("answer", answer)
    rules.add("start", f"{reasoning} answer")
    return rules.text()


def strict_calls(
    form: AnswerFormat, functions: Sequence[Mapping[str, Any]], *, is_parallel: bool, is_open: bool | None = None
) -> str:
    """Return the grammar of any text in which everything that begins like a call is a call that follows its schema.

    Args:
        form: the format of answers; `form.tool_format` is not None.
        functions: as for `forced_calls`.
        is_parallel: whether there may be several calls. Otherwise, the text after the first one cannot contain a
            special token that begins a call, and is not constrained in another way.
        is_open: as for `forced_calls`.
    """
    assert form.tool_format is not None
    rules = _Rules(form)
    prefix, variant = form.tool_format.prefix, form.tool_format.variants[0]
    begin = form.first_tag(prefix or variant.partition("{")[0])
    if not begin:
        calls = rules.calls(variant, prefix, functions, is_parallel=is_parallel)
        rules.add("start", f"{rules.reasoning(is_open=is_open)} ({calls} | {_TEXT_WITHOUT_CALL})?")
        return rules.text()
    if prefix:
        calls = rules.calls(variant, prefix[len(begin) :], functions, is_parallel=is_parallel)
    else:  # each call begins with `begin`, so `start` below repeats them
        calls = rules.calls(variant[len(begin) :], "", functions, is_parallel=False)
    text = rules.any_text()
    if begin in form.tags:
        rules.add("call_in_text", f"{text} {rules.literal(begin)} {calls}")
    else:  # `begin` is ordinary text; a lazy rule ends with its first occurrence
        rules.add("text_to_call[lazy]", f"{_ANY_TEXT} {rules.literal(begin)}")
        rules.add("call_in_text", f"{'' if text == _ANY_TEXT else text} text_to_call {calls}")
    rules.add("start", f"call_in_text{'*' if is_parallel else '?'} {text}")
    return rules.text()


class _Rules:
    """Rules of a grammar.

    Args:
        form: the format of answers.
    """

    def __init__(self, form: AnswerFormat) -> None:
        self._reasoning = form.reasoning
        self._tools = form.tool_format
        self._tags = form.tags
        self._rules: dict[str, str] = {}

    def add(self, name: str, rule: str) -> None:
        """Add a rule."""
        self._rules[name] = rule

    def text(self) -> str:
        """Return the grammar."""
        return "".join(f"{name}: {rule}\n" for name, rule in self._rules.items())

    def literal(self, text: str) -> str:
        """Return an expression of exactly this text, in which the tags are special tokens."""
        pieces = re.split(f"({'|'.join(map(re.escape, self._tags))})", text) if self._tags else [text]
        return " ".join(
            f"<[{self._tags[each]}]>" if each in self._tags else json.dumps(each) for each in pieces if each
        )

    def any_text(self) -> str:
        """Return an expression of any text, including the tags of reasoning."""
        form = self._reasoning
        reasoning_tags = () if form is None else (form.begin, form.end)
        special_tokens = [f"<[{self._tags[each]}]>" for each in reasoning_tags if each in self._tags]
        return f"({_ANY_TEXT} ({' | '.join(special_tokens)}))* {_ANY_TEXT}" if special_tokens else _ANY_TEXT

    def reasoning(self, *, is_open: bool | None) -> str:
        """Return an expression of the reasoning before the answer."""
        form = self._reasoning
        if form is None or is_open is None:
            return ""
        end = self.literal(form.end)
        self.add("reasoning" if form.end in self._tags else "reasoning[lazy]", f"{_ANY_TEXT} {end}")
        return r"reasoning /\s*/" if is_open else rf"({self.literal(form.begin)} reasoning /\s*/)?"

    def calls(self, variant: str, prefix: str, functions: Sequence[Mapping[str, Any]], *, is_parallel: bool) -> str:
        """Return an expression of one call, or of several.

        Args:
            variant: the text of a call, see `ToolFormat`.
            prefix: the text before the first call.
            functions: the functions that may be called.
            is_parallel: whether there may be several calls.
        """
        tools = self._tools
        assert tools is not None
        schemas = [_without_annotations(each.get("parameters") or _NO_ARGUMENTS) for each in functions]
        names = [str(each["name"]) for each in functions]
        before, placeholder, after = re.split(r"\{(calls?|name|python)\}", variant, maxsplit=1)
        further = f"({self.literal(tools.separator)} call)*" if is_parallel else ""
        if placeholder == "name":
            alternatives = [
                self._named_call(index, before + name, after, schema)
                for index, (name, schema) in enumerate(zip(names, schemas, strict=True))
            ]
            self.add("call", " | ".join(alternatives))
        elif placeholder == "python":
            further = ' (", " call)*' if is_parallel else ""
            alternatives = [
                f'{json.dumps(name + "(")} {self._keyword_arguments(schema)} ")"'
                for name, schema in zip(names, schemas, strict=True)
            ]
            self.add("call", " | ".join(alternatives))
            return f'{self.literal(before)} "[" call{further} "]" {self.literal(after)}'
        else:
            schema = _schema_of_call(names, schemas, tools.arguments_key)
            if placeholder == "calls":
                further = ""
                schema = {"type": "array", "minItems": 1, "items": schema} | ({} if is_parallel else {"maxItems": 1})
            self.add("call", f"{self.literal(before)} {_json(schema)} {self.literal(after)}")
        return f"{self.literal(prefix)} call {further} {self.literal(tools.suffix)}"

    def _named_call(self, index: int, before: str, after: str, schema: Any) -> str:
        """Return an expression of a call whose name comes before its arguments.

        Args:
            index: index of the function, for the names of rules.
            before: the text up to the end of the name.
            after: the text after the name, with the placeholders `{arguments}` and perhaps `{id}`.
            schema: schema of the arguments.
        """
        middle, _, end = after.partition("{arguments}")
        middle_parts = [self.literal(each) for each in middle.split("{id}")]
        header = f"{self.literal(before)} {' /[0-9]{1,3}/ '.join(middle_parts)}"
        assert self._tools is not None
        if self._tools.quote:
            return f"{header} {self._quoted_value(f'value_{index}', schema)} {self.literal(end)}"
        if not self._tools.argument:
            return f"{header} {_json(schema)} {self.literal(end)}"
        if _is_free(schema):
            before_key, after_key, after_value = re.split(r"\{key\}|\{value\}", self._tools.argument)
            self.add(f"free_text[suffix={json.dumps(after_value)}]", _ANY_TEXT)
            self.add("free_argument", f"{json.dumps(before_key)} {_FREE_KEY} {json.dumps(after_key)} free_text")
            return f"{header} free_argument* {self.literal(end)}"
        arguments = [
            self._tagged_argument(f"value_{index}_{number}", key, value_schema) + ("" if is_required else "?")
            for number, (key, value_schema, is_required) in enumerate(_properties(schema))
        ]
        return f"{header} {' '.join(arguments)} {self.literal(end)}"

    def _tagged_argument(self, rule: str, key: str, schema: Any) -> str:
        """Return an expression of an argument with tags of its own; `rule` is the name of the rule of its value."""
        assert self._tools is not None
        before, _, after = self._tools.argument.replace("{key}", key).partition("{value}")
        values = _allowed_texts(schema)
        if values is None:
            return f"({json.dumps(before)} {_json(schema)} {json.dumps(after)})"
        if values:
            choices = " | ".join(json.dumps(each) for each in values)
            return f"({json.dumps(before)} ({choices}) {json.dumps(after)})"
        self.add(f"{rule}[suffix={json.dumps(after)}]", _ANY_TEXT)
        return f"({json.dumps(before)} {rule})"

    def _quoted_value(self, rule: str, schema: Any) -> str:
        """Return an expression of a value with the quotes of the format.

        Args:
            rule: the beginning of the names of the rules of this value.
            schema: schema of the value. Where it describes no object, list or simple value, any value is allowed.
        """
        assert self._tools is not None
        schema = schema if isinstance(schema, dict) else {}
        quote, kind, texts = self.literal(self._tools.quote), schema.get("type"), _allowed_texts(schema)
        if texts:
            return f"{quote} ({' | '.join(json.dumps(each) for each in texts)}) {quote}"
        if texts is not None:
            return f"{quote} {self._quoted_text(rule)}"
        if kind == "object" and schema.get("properties"):
            pairs = [
                (f"{json.dumps(key + ':')} {self._quoted_value(f'{rule}_{number}', each)}", is_required)
                for number, (key, each, is_required) in enumerate(_properties(schema))
            ]
            return f'"{{" {_join(pairs, ",")} "}}"'
        if kind == "object" and schema.get("additionalProperties") is False:
            return '"{}"'
        if kind == "array" and isinstance(schema.get("items"), dict):
            item = self._quoted_value(f"{rule}_item", schema["items"])
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind in ("integer", "number", "boolean", "null"):
            return _json(schema)
        self.add("any_value", f"{quote} {self._quoted_text('any')} | any_object | any_list | any_simple")
        self.add("any_simple", '%json {"type": ["number", "boolean", "null"]}')
        self.add("any_pair", f'{_FREE_KEY} ":" any_value')
        self.add("any_object", '"{" (any_pair ("," any_pair)*)? "}"')
        self.add("any_list", '"[" (any_value ("," any_value)*)? "]"')
        return "any_object" if kind == "object" else "any_value"

    def _quoted_text(self, rule: str) -> str:
        """Return an expression of any text and the quote after it."""
        assert self._tools is not None
        quote = self._tools.quote
        if quote in self._tags:
            return f"{_ANY_TEXT} {self.literal(quote)}"
        self.add(f"{rule}_text[suffix={json.dumps(quote)}]", _ANY_TEXT)
        return f"{rule}_text"

    def _keyword_arguments(self, schema: Any) -> str:
        if _is_free(schema):
            self.add("free_argument", f'{_FREE_KEY} "=" {_json({})}')
            return '(free_argument (", " free_argument)*)?'
        pairs = [(f'"{key}=" {_json(each)}', is_required) for key, each, is_required in _properties(schema)]
        return _join(pairs, ", ")


def _join(pairs: Sequence[tuple[str, bool]], separator: str) -> str:
    """Join expressions with a separator: all required ones, then any of the optional ones, in their order.

    Args:
        pairs: the expressions, each with whether it is required.
        separator: the text between two of them.
    """
    comma = json.dumps(separator)
    required = [pair for pair, is_required in pairs if is_required]
    optional = [pair for pair, is_required in pairs if not is_required]
    with_comma = [f"({comma} {each})?" for each in optional]
    if required or not optional:
        return " ".join([f" {comma} ".join(required), *with_comma])
    # No comma comes before the first expression that is used: each alternative begins with another one.
    chains = [" ".join([each, *with_comma[index + 1 :]]) for index, each in enumerate(optional)]
    return f"({' | '.join(chains)})?"


def _schema_of_call(names: Sequence[str], schemas: Sequence[Any], key: str) -> dict[str, Any]:
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: schema},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name, schema in zip(names, schemas, strict=True)
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _json(schema: Any) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACING} if isinstance(schema, dict) else schema)}"


def _is_free(schema: Any) -> bool:
    """Return whether a schema allows an object with any properties, and names none."""
    if not isinstance(schema, dict):
        return True
    return not schema.get("properties") and schema.get("additionalProperties") is not False


def _properties(schema: Any) -> list[tuple[str, Any, bool]]:
    """Return the name and the schema of each property that an object may have, and whether it is required."""
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    required = schema.get("required") or ()
    properties = []
    for name, property_schema in (schema.get("properties") or {}).items():
        if property_schema is False:  # no value is valid
            continue
        complete_schema = {**property_schema, **definitions} if isinstance(property_schema, dict) else {}
        properties.append((name, complete_schema, name in required))
    return properties


def _allowed_texts(schema: Mapping[str, Any]) -> list[str] | None:
    """Return the texts that a schema allows, an empty list if it allows any, or None if it allows other values."""
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    implied_type = "string" if values else None
    if schema.get("type", implied_type) != "string" or not all(isinstance(each, str) for each in values):
        return None
    return list(values)


def _without_annotations(schema: Any) -> Any:
    """Return a schema without annotations."""
    if not isinstance(schema, dict):
        return [_without_annotations(each) for each in schema] if isinstance(schema, list) else schema
    constraints: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _KEYS_OF_NAMED_SCHEMAS and isinstance(value, dict):
            constraints[key] = {name: _without_annotations(subschema) for name, subschema in value.items()}
        elif key not in _ANNOTATIONS:
            constraints[key] = value if key in _KEYS_OF_VALUES else _without_annotations(value)
    return constraints
