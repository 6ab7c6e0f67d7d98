"""A chat template: the Jinja template of a model that renders a conversation as text.

The environment is that of `apply_chat_template` of transformers, for which published templates are written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.utils import Namespace

from radixkv.service.text.conversation import (
    Conversation,
    WriteCalls,
    json_copy,
    with_calls_as_text,
    with_longer_content,
    with_tools,
    without_tool_calls,
    without_tools,
)

# Variables of every template that are separate arguments of `render`.
_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt")
_Shape = tuple[frozenset[tuple[str, type, frozenset[type]]], bool, bool]  # see `_shape`
# A template that reads the tools in a message, as JSON text.
_TOOLS_OF_MESSAGE = re.compile(r"message(?:\.tools\b|\[(['\"])tools\1\])")
_MAX_WRITTEN_PARTS = 256


class ChatTemplate:
    """Renders conversations. Templates come with a model and are not trusted, so they run in Jinja's sandbox.

    Args:
        source: the template.
        special_tokens: text of the tokenizer's special tokens by name, such as `bos_token`; variables of the template.
        now: returns the local time, for templates that write the date.
        write_calls: writes tool calls as the model does, for a template that writes no tool calls.

    Raises:
        ValueError: the source is not a valid template.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
        write_calls: WriteCalls | None = None,
    ) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        environment.globals["dict"] = _Dict()
        environment.globals["namespace"] = _TemplateNamespace
        self._special_tokens = special_tokens
        self._write_calls = write_calls
        self._written_parts: set[tuple[str, _Shape]] = set()  # parts that the template writes, with the shape
        try:
            self._template = environment.from_string(source)
            self._variable_names = {each.name for each in environment.parse(source).find_all(nodes.Name)}
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template is not valid: {error}") from error
        has_tools_variable = "tools" in self._variable_names
        self._reads_tools_of_message = not has_tools_variable and bool(_TOOLS_OF_MESSAGE.search(source))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation.

        A conversation is refused if the template would drop a part of it. To find out, the conversation is rendered
        again without the tools, without the documents, without the tool calls, and with other contents, and each
        time the text must differ from the first, or rendering must fail. A part that the template has written is not
        checked again in conversations of the same shape. Two conversations have the same shape if they agree in whether
        there are tools, in whether there are documents, and in the roles, the types of contents and the types of the
        arguments of tool calls that occur in their messages. The messages have several forms, see
        `radixkv.service.text.conversation`; the first form from which nothing is dropped is used.

        Args:
            messages: at least one; see `Conversation`.
            tools: JSON schemas of functions that the model may call.
            documents: texts that the answer may be based on.
            add_generation_prompt: end with the beginning of the model's answer.
            variables: further variables of the template.

        Raises:
            TypeError: an argument contains a value that has no JSON type.
            ValueError: there is no message, or the template rejects the messages, fails, or would drop an argument.
        """
        conversation = Conversation(messages)
        tools = json_copy(tools)
        values = {
            **self._special_tokens,
            **self._check_variables(json_copy(dict(variables or {}))),
            "tools": None if self._reads_tools_of_message else tools,
            "documents": json_copy(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        if documents and "documents" not in self._variable_names:
            raise _dropped_error("documents")
        first_error: ValueError | None = None
        for form in self._forms(conversation):
            try:
                form = with_tools(form, tools) if tools and self._reads_tools_of_message else form
                return self._render_checked(conversation, {**values, "messages": form})
            except ValueError as error:
                first_error = first_error or error
        assert first_error is not None
        raise first_error

    def _forms(self, conversation: Conversation) -> Iterator[list[dict[str, Any]]]:
        """Iterate over the forms of a conversation; in the last ones, its tool calls are text."""
        yield from conversation.forms()
        if conversation.has_tool_calls and self._write_calls is not None:
            for form in conversation.forms():
                yield with_calls_as_text(form, self._write_calls)

    def has_variable(self, name: str) -> bool:
        """Return whether a variable of this name occurs in the template."""
        return name in self._variable_names

    def _check_variables(self, variables: dict[str, Any]) -> dict[str, Any]:
        for name, value in variables.items():
            if name in _ARGUMENTS:
                raise ValueError(f"chat_template_kwargs: {name} must be passed as a separate argument")
            if value is not None and name not in self._variable_names:
                raise ValueError(f"chat_template_kwargs: the model's chat template has no variable {name}")
        return variables

    def _render_checked(self, conversation: Conversation, values: dict[str, Any]) -> str:
        """Return the text of the form of the conversation in `values`, unless the template drops a part of the form.

        Raises:
            ValueError: the template drops a part, rejects the messages or fails.
        """
        text, messages = self._render(values), values["messages"]
        shape = _shape(values)
        for name in ("tools", "documents"):
            if values[name]:
                self._require_written(text, name, shape, {**values, name: None})
        if any("tools" in each for each in messages):
            self._require_written(text, "tools", shape, {**values, "messages": without_tools(messages)})
        if any(each.get("tool_calls") for each in messages):
            self._require_written(text, "tool_calls", shape, {**values, "messages": without_tool_calls(messages)})
        for role in conversation.roles:
            altered = {**values, "messages": with_longer_content(messages, role)}
            self._require_written(text, f"messages of the role {role}", shape, altered)
        return text

    def _require_written(self, text: str, part: str, shape: _Shape, altered: dict[str, Any]) -> None:
        """Raise ValueError if the values with an altered part give the same text, so that the template drops the part.

        A part that the template has written is not checked again in conversations of the same shape.
        """
        if (part, shape) in self._written_parts:
            return
        try:
            is_dropped = self._render(altered) == text
        except ValueError:
            return
        if is_dropped:
            raise _dropped_error(part)
        if len(self._written_parts) < _MAX_WRITTEN_PARTS:
            self._written_parts.add((part, shape))

    def _render(self, values: dict[str, Any]) -> str:
        try:
            return self._template.render(values)
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template rejects these messages: {error}") from error
        except Exception as error:  # a template may compute with values of unexpected types
            raise ValueError(f"the model's chat template failed with {type(error).__name__}") from error


def _shape(values: Mapping[str, Any]) -> _Shape:
    """Return the shape of a conversation; see `ChatTemplate.render`.

    The branches of a template that run depend on the shape. They may also depend on contents and on the number of
    messages, which are not a part of it.
    """
    messages = frozenset(
        (each.get("role"), type(each.get("content")), frozenset(map(_type_of_arguments, each.get("tool_calls") or ())))
        for each in values["messages"]
    )
    return messages, bool(values["tools"]), bool(values["documents"])


def _type_of_arguments(call: Mapping[str, Any]) -> type:
    function = call.get("function")
    return type((function if isinstance(function, dict) else call).get("arguments"))


def _dropped_error(part: str) -> ValueError:
    prefix = f"{part}: " if part in _ARGUMENTS else ""
    return ValueError(
        f"{prefix}the model's chat template drops {part}: send them as text in another message, or serve a model whose "
        "template writes them"
    )


class _GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %}`, with which templates mark the model's messages for training."""

    tags = {"generation"}  # noqa: RUF012  Jinja requires this name and type

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the marked part in its own scope."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """`dict` in templates: creates dictionaries, and gives access to nothing else."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _TemplateNamespace(Namespace):
    """`namespace` in templates, without access to Python's attributes."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *mappings = args  # not a parameter, because a template may pass a keyword argument `self`
        values = dict(*mappings, **kwargs)
        for name in values:
            _require_public(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError("a name in a namespace begins with an underscore")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without escapes for HTML, which Jinja's own filter would add."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
