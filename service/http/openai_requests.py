"""Reads requests of OpenAI's API: `/v1/chat/completions` and `/v1/completions`.

Fields that vLLM adds to OpenAI's, such as `top_k` and `cache_salt`, have the same names here. A field that would change
the answer and that this server does not support is refused by name.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from radixkv.api.sampling import (
    MAX_ANSWERS,
    MAX_BIASED_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_TOP_LOGPROBS,
    NUM_SEEDS,
)
from radixkv.errors import InvalidRequest
from radixkv.service.http.breakpoints import RETENTION_PRIORITY, Breakpoint
from radixkv.service.http.json_fields import Fields
from radixkv.service.http.sessions import read_session
from radixkv.service.http.tools import EncodedChat, Tools, reasoning_variables
from radixkv.service.structured.grammar_text import GrammarText
from radixkv.service.text.answer_format import AnswerFormat
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.v1.prefill_pb2 import GenerateRequest

_MAX_INT32 = 2**31 - 1
_MAX_ID_DIGITS = 10  # of a token id below 2**32
_MAX_TEMPERATURE = 2.0
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for `/v1/completions`; a chat may use the whole context
_RETENTION_S = {"in_memory": 0, "in-memory": 0, "24h": 24 * 3600}
_CACHE_TTL_S = {"30m": 1800, "12h": 12 * 3600}
_DEFAULT_CACHE_TTL_S = 1800
_BREAKPOINT_FIELD = "prompt_cache_breakpoint"
_MAX_BREAKPOINTS = 4  # of a request; the implicit one, at the end of the prompt, is one of them

_CONSTRAINT_FIELDS = ("json", "regex", "choice", "grammar", "json_object")  # of `structured_outputs`

# Fields that do not affect the answer of this server.
_FIELDS_WITHOUT_EFFECT = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",  # routes equal prefixes to one server; here they share one cache anyway
)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation.

    Attributes:
        messages: see `Tokenizer.encode_chat`.
        tools: the tools that the model may call.
        documents: see `Tokenizer.encode_chat`.
        add_generation_prompt: see `Tokenizer.encode_chat`.
        variables: variables of the chat template.
        breakpoints: the positions up to which the prompt should be retained.
        effort: how much the model should reason; None if the request does not say.
        has_reasoning: whether the response contains the reasoning.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Tools
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    variables: Mapping[str, Any]
    breakpoints: Sequence[Breakpoint]
    effort: str | None
    has_reasoning: bool

    def encode(self, form: AnswerFormat, tokenizer: Tokenizer) -> EncodedChat:
        """Encode the conversation.

        Args:
            form: how the model writes its answers.
            tokenizer: tokenizer of the model.

        Raises:
            InvalidRequest: the model's tool calls cannot be recognized, or it cannot reason as requested.
            TypeError, ValueError: see `Tokenizer.encode_chat`.
        """
        self.tools.require_format(form)
        effort = {} if self.effort is None else reasoning_variables(tokenizer, form, self.effort)
        render = partial(
            tokenizer.render_chat,
            tools=self.tools.definitions or None,
            documents=self.documents,
            chat_template_kwargs={**effort, **self.variables},
        )
        text = render(self.messages, add_generation_prompt=self.add_generation_prompt)
        chat = EncodedChat.encode(text, tokenizer, form, self.tools)
        return chat.with_ranges(self.breakpoints, self.messages, tokenizer, render)


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """The options of a request, apart from its prompt.

    Attributes:
        model: the model or adapter.
        generate: the options of the completions, without token ids and stop strings. `max_new_tokens` is absent if the
            completion may use the whole context, and 0 if only the prompt is to be cached.
        stops: stop strings.
        is_streamed: whether text is sent as it is generated.
        has_usage_chunk: whether a stream ends with a chunk that has the usage.
    """

    model: str
    generate: GenerateRequest
    stops: tuple[str, ...]
    is_streamed: bool
    has_usage_chunk: bool


def read_chat(fields: Fields) -> tuple[ChatPrompt, CompletionOptions]:
    """Read a request to `/v1/chat/completions`.

    Raises:
        InvalidRequest: the message names the field.
    """
    prompt = _read_conversation(fields)
    max_tokens = fields.integer("max_completion_tokens", 0, _MAX_INT32)
    if max_tokens is None:
        max_tokens = fields.integer("max_tokens", 0, _MAX_INT32)
    else:
        fields.ignore("max_tokens")  # deprecated in favor of `max_completion_tokens`
    options = _read_options(fields, max_tokens)
    prompt.tools.require_possible(options.generate)
    if fields.flag("logprobs"):
        options.generate.logprobs = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS, 0) or 0
    else:
        fields.require_neutral("it requires logprobs: true", top_logprobs=0)
    fields.require_neutral(
        "this server generates text only",
        modalities=(["text"],),
        audio=(),
        prediction=(),
        web_search_options=(),
        functions=([],),
        function_call=("none", "auto"),
    )
    fields.require_neutral("this server stores no responses", store=False)
    fields.require_neutral("this server does not control the verbosity", verbosity="medium")
    fields.require_neutral("this server moderates nothing", moderation=())
    fields.require_no_others()
    return prompt, options


def read_completion(fields: Fields) -> tuple[list[str | list[Any]], CompletionOptions]:
    """Read a request to `/v1/completions`. Returns its prompts, each of them text or a list, and its options.

    Raises:
        InvalidRequest: the message names the field.
    """
    prompts = _read_prompts(fields)
    options = _read_options(fields, fields.integer("max_tokens", 0, _MAX_INT32, _DEFAULT_COMPLETION_TOKENS))
    num_completions = options.generate.n if options.generate.HasField("n") else 1
    if len(prompts) * num_completions > MAX_ANSWERS:
        raise InvalidRequest(
            f"prompt, n: expected at most {MAX_ANSWERS} completions together, got {len(prompts) * num_completions}"
        )
    logprobs = fields.integer("logprobs", 0, MAX_TOP_LOGPROBS)
    if logprobs is not None:
        options.generate.logprobs = logprobs
    fields.require_neutral("this server returns only new text", echo=False)
    fields.require_neutral("this server does not fill in the middle", suffix="")
    fields.require_neutral("use n", best_of=tuple({1, num_completions}))
    fields.require_no_others()
    return prompts, options


def _read_conversation(fields: Fields) -> ChatPrompt:
    messages = fields.items("messages")
    if not messages:
        raise InvalidRequest("messages: expected at least one message, got none")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidRequest(f"messages[{index}]: expected an object with a role and content, got another value")
        if not message.get("role") or not isinstance(message["role"], str):
            raise InvalidRequest(f"messages[{index}].role: expected a role, got nothing or another value")
    _, ttl_s, is_explicit = _read_cache_options(fields)
    parts = _MessageParts(messages, ttl_s or _DEFAULT_CACHE_TTL_S)
    # Unless the mode is explicit, the end of the prompt is a breakpoint as well. The last breakpoints are used.
    max_breakpoints = _MAX_BREAKPOINTS if is_explicit else _MAX_BREAKPOINTS - 1
    breakpoints = parts.breakpoints[-max_breakpoints:]
    tools = _read_tools(fields)
    documents = [*fields.items("documents"), *parts.documents]
    variables = fields.any("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise InvalidRequest("chat_template_kwargs: expected an object, got another value")
    return ChatPrompt(
        parts.messages,
        tools,
        documents or None,
        fields.flag("add_generation_prompt", default=True),
        variables,
        breakpoints,
        fields.text("reasoning_effort"),
        fields.flag("include_reasoning", default=True),
    )


class _MessageParts:
    """Separates breakpoints and files, which templates do not read in messages, from the messages.

    Attributes:
        messages: the messages without breakpoints and files.
        documents: the files, as documents.
        breakpoints: all breakpoints, in the order of their positions.
    """

    def __init__(self, messages: Sequence[dict[str, Any]], ttl_s: int) -> None:
        self.messages: list[dict[str, Any]] = []
        self.documents: list[dict[str, Any]] = []
        self.breakpoints: list[Breakpoint] = []
        for index, message in enumerate(messages):
            content = message.get("content")
            parts = content if isinstance(content, list) else []
            if any(
                isinstance(part, dict) and (part.get("type") == "file" or _BREAKPOINT_FIELD in part) for part in parts
            ):
                message = {**message, "content": self._separate(parts, f"messages[{index}].content", ttl_s)}
            self.messages.append(message)

    def _separate(self, parts: Sequence[Any], place: str, ttl_s: int) -> list[Any]:
        """Return the parts of the next message without breakpoints and files."""
        template_parts: list[Any] = []
        for part_index, part in enumerate(parts):
            if not isinstance(part, dict):
                template_parts.append(part)
                continue
            control = part.get(_BREAKPOINT_FIELD)
            if part.get("type") == "file":
                file = Fields.of(part.get("file"), f"{place}[{part_index}].file")
                self.documents.append(read_file(file))
                file.require_no_others()
            else:
                template_parts.append({name: value for name, value in part.items() if name != _BREAKPOINT_FIELD})
            if control is not None:
                own_ttl_s = read_breakpoint(control, f"{place}[{part_index}].{_BREAKPOINT_FIELD}")
                self.breakpoints.append(Breakpoint(len(self.messages) + 1, len(template_parts), own_ttl_s or ttl_s))
        return template_parts


def read_file(file: Fields) -> dict[str, Any]:
    """Read the file of a content part, which must be text in a data URL.

    Returns:
        A document for the chat template: `title` and `text`.

    Raises:
        InvalidRequest: the message names the field.
    """
    file.require_neutral("this server stores no files; send file_data", file_id=())
    file.require_neutral("this server loads no files; send file_data", file_url=())
    title = file.text("filename", "") or ""
    place = file.path_of("file_data")
    media_type, comma, encoded = (file.text("file_data") or "").partition(",")
    if not (comma and media_type.startswith("data:text/") and media_type.endswith(";base64")):
        raise InvalidRequest(
            f"{place}: expected text as data:text/plain;base64,..., since models are served for text only, got "
            "another value"
        )
    try:
        return {"title": title, "text": base64.b64decode(encoded, validate=True).decode()}
    except (binascii.Error, UnicodeDecodeError):  # the message would contain a part of the file
        raise InvalidRequest(f"{place}: expected text in UTF-8, encoded as base64, got something else") from None


def read_breakpoint(value: object, place: str) -> int | None:
    """Return the time to live of a `prompt_cache_breakpoint` in seconds; None if it has no `ttl`.

    Raises:
        InvalidRequest: the value is not a breakpoint.
    """
    control = Fields.of(value, place)
    control.one_of("mode", ("explicit",), "explicit")
    ttl = control.one_of("ttl", tuple(_CACHE_TTL_S), "") or None
    control.require_no_others()
    return None if ttl is None else _CACHE_TTL_S[ttl]


def _read_tools(fields: Fields) -> Tools:
    definitions = fields.items("tools")
    for index, value in enumerate(definitions):
        tool = Fields.of(value, f"tools[{index}]")
        tool.one_of("type", ("function",), "function")
        function = _function_of(tool)
        if not isinstance(function.any("parameters"), dict | None):
            raise InvalidRequest(f"{function.path_of('parameters')}: expected a JSON schema, got another value")
        function.flag("strict")
        tool.require_no_others()
    choice, forced, allowed = _read_tool_choice(fields)
    is_parallel = fields.flag("parallel_tool_calls", default=True)
    if not definitions:
        if choice == "required":
            raise InvalidRequest("tool_choice: expected tools to choose from, got none")
        return Tools()
    return Tools(definitions, choice, forced, allowed, is_parallel)


def _read_tool_choice(fields: Fields) -> tuple[str, str | None, list[str] | None]:
    """Return the choice, the tool that must be called, and the tools that may be called; see `Tools`."""
    choice = fields.any("tool_choice")
    if not isinstance(choice, dict):
        if choice not in (None, "none", "auto", "required"):
            raise InvalidRequest("tool_choice: expected none, auto, required or a function, got another value")
        return choice or "auto", None, None
    chosen = Fields(choice, "tool_choice")
    if chosen.one_of("type", ("function", "allowed_tools"), "function") == "function":
        return "required", _function_of(chosen).any("name"), None
    subset = Fields.of(chosen.any("allowed_tools"), "tool_choice.allowed_tools")
    mode = subset.one_of("mode", ("auto", "required"), "auto")
    tools = [Fields.of(each, f"{subset.path_of('tools')}[{index}]") for index, each in enumerate(subset.items("tools"))]
    return mode, None, [_function_of(each).any("name") for each in tools]


def _function_of(tool: Fields) -> Fields:
    """Return the function in a tool or in a reference to one. It has a name."""
    function = tool.inner("function")
    if function is None or not function.text("name"):
        raise InvalidRequest(f"{tool.path_of('function')}.name: expected a name, got nothing")
    return function


def _read_prompts(fields: Fields) -> list[str | list[Any]]:
    """Read the field `prompt`: text, token ids, or a list of either. Lists of token ids are checked later."""
    prompt = fields.any("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest("prompt: expected text, a list of token ids, or a list of these, got another value")
    if not isinstance(prompt[0], str | list):
        return [prompt]
    for index, each in enumerate(prompt):
        if not isinstance(each, str | list):
            raise InvalidRequest(f"prompt[{index}]: expected text or a list of token ids, got another value")
    return prompt


def _read_options(fields: Fields, max_tokens: int | None) -> CompletionOptions:
    """Read the options that chats and completions have in common."""
    generate = GenerateRequest(
        temperature=fields.number("temperature", 0, _MAX_TEMPERATURE, 1.0),
        top_k=_read_top_k(fields),
        min_p=fields.number("min_p", 0, 1, 0.0),
        presence_penalty=fields.number("presence_penalty", -MAX_PENALTY, MAX_PENALTY, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -MAX_PENALTY, MAX_PENALTY, 0.0),
        min_tokens=fields.integer("min_tokens", 0, _MAX_INT32, 0),
        stop_token_ids=fields.integers("stop_token_ids"),
        ignore_eos=fields.flag("ignore_eos"),
        logit_bias=_read_logit_bias(fields),
        top_p=fields.number("top_p", 0, 1),
        repetition_penalty=fields.number("repetition_penalty", 1e-6, 1e6),
        n=fields.integer("n", 1, MAX_ANSWERS),
        max_new_tokens=max_tokens,
    )
    seed = fields.integer("seed", -(2**63), NUM_SEEDS - 1)
    if seed is not None:
        generate.seed = seed % NUM_SEEDS
    prefill = generate.prefill
    prefill.salt = fields.text("cache_salt", "") or ""
    prefill.request_id = fields.text("request_id", "") or ""
    read_session(fields, prefill)
    _read_retention(fields, generate)
    _read_format(fields, generate)
    stream_options = fields.inner("stream_options")
    is_streamed = fields.flag("stream")
    has_usage_chunk = False
    if stream_options is not None:
        if not is_streamed:
            raise InvalidRequest("stream_options: expected it only with stream: true")
        has_usage_chunk = stream_options.flag("include_usage")
        stream_options.ignore("include_obfuscation")
        stream_options.require_no_others()
    fields.ignore(*_FIELDS_WITHOUT_EFFECT)
    fields.require_neutral("this server has one tier of service", service_tier=("auto", "default"))
    return CompletionOptions(
        model=fields.text("model", "") or "",
        generate=generate,
        stops=_read_stops(fields),
        is_streamed=is_streamed,
        has_usage_chunk=has_usage_chunk,
    )


def _read_top_k(fields: Fields) -> int:
    top_k = fields.integer("top_k", -1, _MAX_INT32, 0) or 0
    return max(0, top_k)  # in vLLM's API, -1 means all tokens as well


def _read_stops(fields: Fields) -> tuple[str, ...]:
    stop = fields.any("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise InvalidRequest("stop: expected a string or a list of strings, got another value")
    return tuple(stops)


def _read_logit_bias(fields: Fields) -> dict[int, float]:
    values = fields.any("logit_bias") or {}
    if not isinstance(values, dict) or len(values) > MAX_BIASED_TOKENS:
        got = f"{len(values)} of them" if isinstance(values, dict) else "another value"
        raise InvalidRequest(f"logit_bias: expected an object with at most {MAX_BIASED_TOKENS} token ids, got {got}")
    entries = Fields(values, "logit_bias")
    biases = {}
    for name in values:
        if not (name.isascii() and name.isdecimal() and len(name) <= _MAX_ID_DIGITS and int(name) < 2**32):
            raise InvalidRequest("logit_bias: expected token ids as names, got another name")
        biases[int(name)] = float(entries.number(name, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, 0.0) or 0.0)
    return biases


def _read_retention(fields: Fields, generate: GenerateRequest) -> None:
    """Read how long the prompt should be retained."""
    seconds = 0
    name = fields.text("prompt_cache_retention")
    if name is not None:
        if name not in _RETENTION_S:
            raise InvalidRequest(f"prompt_cache_retention: expected one of {', '.join(_RETENTION_S)}, got another name")
        seconds = _RETENTION_S[name]
    is_prewarm, ttl_s, is_explicit = _read_cache_options(fields)
    if is_prewarm:
        generate.max_new_tokens = 0
    if not is_explicit:  # otherwise the `ttl` applies only to breakpoints in the messages
        seconds = max(seconds, ttl_s or 0)
    if seconds:
        generate.prefill.retention.priority = RETENTION_PRIORITY
        generate.prefill.retention.ttl.seconds = seconds


def _read_cache_options(fields: Fields) -> tuple[bool, int | None, bool]:
    """Read `prompt_cache_options`.

    Returns:
        Whether to cache the prompt without an answer, the time to live of breakpoints in seconds (None if not given),
        and whether there is no breakpoint at the end of the prompt.
    """
    options = fields.inner("prompt_cache_options")
    if options is None:
        return False, None, False
    ttl = options.one_of("ttl", tuple(_CACHE_TTL_S), "")
    is_explicit = options.one_of("mode", ("implicit", "explicit"), "implicit") == "explicit"
    is_prewarm = options.flag("prewarm")
    options.ignore("comparison_response_id")  # the usage has the reason of a miss
    options.require_no_others()
    return is_prewarm, _CACHE_TTL_S.get(ttl), is_explicit


def _read_format(fields: Fields, generate: GenerateRequest) -> None:
    """Read the format that the answer must have, from `response_format` or vLLM's `structured_outputs`."""
    response_format = fields.inner("response_format")
    structured_outputs = fields.inner("structured_outputs")
    if response_format is not None and structured_outputs is not None:
        raise InvalidRequest("response_format, structured_outputs: expected one of them, got both")
    if response_format is not None:
        _read_response_format(response_format, generate)
    if structured_outputs is not None:
        _read_structured_outputs(structured_outputs, generate)


def _read_response_format(response_format: Fields, generate: GenerateRequest) -> None:
    kind = response_format.one_of("type", ("text", "json_object", "json_schema"), "text")
    if kind == "json_object":
        generate.json_object = True
    if kind == "json_schema":
        schema = response_format.inner("json_schema")
        if schema is None or "schema" not in schema:
            raise InvalidRequest("response_format.json_schema.schema: expected a JSON schema, got none")
        generate.json_schema = json.dumps(schema.any("schema"))
        schema.ignore("name", "description", "strict")
        schema.require_no_others()
    response_format.require_no_others()


def _read_structured_outputs(structured_outputs: Fields, generate: GenerateRequest) -> None:
    kinds = [name for name in _CONSTRAINT_FIELDS if name in structured_outputs]
    if len(kinds) != 1:
        got = ", ".join(kinds) or "none"
        raise InvalidRequest(f"structured_outputs: expected one of {', '.join(_CONSTRAINT_FIELDS)}, got {got}")
    kind = kinds[0]
    if kind == "json":
        schema = structured_outputs.any(kind)
        generate.json_schema = schema if isinstance(schema, str) else json.dumps(schema)
    elif kind == "choice":
        choices = structured_outputs.items(kind)
        if not choices or not all(isinstance(each, str) for each in choices):
            raise InvalidRequest("structured_outputs.choice: expected a list of at least one string, got another value")
        generate.grammar = GrammarText.of_choices(kind, choices).text
    elif kind == "json_object":
        generate.json_object = structured_outputs.flag(kind)
    else:
        setattr(generate, kind, structured_outputs.text(kind) or "")
    structured_outputs.require_no_others()
