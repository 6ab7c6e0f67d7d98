"""A chat template: the Jinja template of a model that renders a conversation as text.

The environment is that of `apply_chat_template` of transformers, for which published templates are written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.utils import Namespace

# Names for the reasoning of a message. Templates read the first one, those of gpt-oss the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Converts values of subclasses, such as members of an enumeration, to the JSON type.
_SCALARS: tuple[tuple[type, Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
)


class ChatTemplate:
    """Renders conversations. Templates come with a model and are not trusted, so they run in Jinja's sandbox.

    Args:
        source: the template.
        special_tokens: text of the tokenizer's special tokens by name, such as `bos_token`; variables of the template.
        now: returns the local time, for templates that write the date.

    Raises:
        ValueError: the source is not a valid template.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        environment.globals["dict"] = _Dict()
        environment.globals["namespace"] = _Namespace
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template is not valid: {error}") from error

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

        Args:
            messages: at least one; see `Tokenizer.encode_chat`.
            tools: JSON schemas of functions that the model may call.
            documents: texts that the answer may be based on.
            add_generation_prompt: end with the beginning of the model's answer.
            variables: further variables of the template.

        Raises:
            TypeError: an argument contains a value that has no JSON type.
            ValueError: there is no message, or the template rejects the messages or fails.
        """
        if not messages:
            raise ValueError("expected at least one message, got none")
        values = {
            **self._special_tokens,
            **_plain(dict(variables or {})),
            "messages": [_message(each) for each in messages],
            "tools": _plain(tools),
            "documents": _plain(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(values)
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
        except Exception as error:  # a template may compute with values of unexpected types
            raise ValueError(f"the model's chat template fails over these messages: {type(error).__name__}") from error


class _GenerationTag(jinja2.ext.Extension):
    """Accepts `{% generation %}`, with which templates mark the model's messages for training."""

    tags = {"generation"}  # noqa: RUF012  Jinja requires this name and type

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the marked part in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Dict:
    """`dict` in templates: creates dictionaries, and gives access to nothing else."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` in templates, without attributes of Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *others = args  # templates may use the name `self`
        values = dict(*others, **kwargs)
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
    """Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _message(message: object) -> dict[str, Any]:
    """Return a message with JSON types only, without values that are None: OpenAI's API returns `content: null`."""
    plain = _plain(message)
    if not isinstance(plain, dict):
        raise TypeError(f"messages: expected mappings with a role and content, got {type(message).__name__}")
    plain = {name: value for name, value in plain.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: object) -> Any:
    """Return a copy with JSON types only, because a template could call methods of other objects."""
    if value is None or isinstance(value, bool):
        return value
    for kind, plain in _SCALARS:
        if isinstance(value, kind):
            return plain(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item) for item in value]
    if callable(dump := getattr(value, "model_dump", None)):  # a Pydantic model, such as a message of OpenAI's client
        return _plain(dump())
    raise TypeError(f"chat: expected text, numbers, lists and mappings, got {type(value).__name__}")
