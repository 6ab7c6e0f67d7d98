"""Reads requests of Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from radixkv.errors import InvalidRequest
from radixkv.service.http.breakpoints import Breakpoint
from radixkv.service.http.cache_diagnostics import PromptParts
from radixkv.service.http.json_fields import Fields
from radixkv.service.http.sessions import read_session, session_of_user
from radixkv.service.http.tools import EncodedChat, Tools, reasoning_switch
from radixkv.service.text.answer_format import AnswerFormat
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.v1.prefill_pb2 import GenerateRequest

MAX_BREAKPOINTS = 4

_MAX_INT32 = 2**31 - 1
_BUDGET_VARIABLE = "thinking_budget"  # a variable of chat templates
_TTL_S = {"5m": 300, "1h": 3600}


@dataclass(frozen=True, slots=True)
class MessagesPrompt:
    """A conversation with its breakpoints.

    Attributes:
        messages: in the form of OpenAI's API, the system prompt first.
        breakpoints: in the order of their positions.
        has_thinking: whether the model may think; None if the request does not say.
        thinking_budget: maximum number of tokens of reasoning; None if the request does not say.
        tools: the tools that the model may call.
        documents: plain-text documents, which templates write before the conversation.
    """

    messages: Sequence[Mapping[str, Any]]
    breakpoints: Sequence[Breakpoint]
    has_thinking: bool | None
    thinking_budget: int | None
    tools: Tools
    documents: Sequence[Mapping[str, Any]]

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
        render = partial(
            tokenizer.render_chat,
            tools=self.tools.definitions or None,
            documents=self.documents or None,
            chat_template_kwargs=self._variables(tokenizer, form),
        )
        chat = EncodedChat.encode(render(self.messages), tokenizer, form, self.tools)
        return chat.with_ranges(self.breakpoints, self.messages, tokenizer, render)

    def _variables(self, tokenizer: Tokenizer, form: AnswerFormat) -> dict[str, Any]:
        """Return the template variables for reasoning. As in Anthropic's API, it is off unless it is requested."""
        budget = self.thinking_budget if self.has_thinking else 0
        has_budget = budget is not None and tokenizer.has_template_variable(_BUDGET_VARIABLE)
        variables = {_BUDGET_VARIABLE: budget} if has_budget else {}
        switch = reasoning_switch(tokenizer)
        if switch is not None:
            return {**variables, switch: bool(self.has_thinking)}
        if has_budget:
            return variables
        if self.has_thinking is not None and self.has_thinking != (form.reasoning is not None):
            how_often = "never" if form.reasoning is None else "always"
            raise InvalidRequest(
                f"thinking.type: this model {how_often} reasons, since its chat template has no switch"
            )
        return {}

    def compared_parts(self, model: str, num_tokens: int) -> PromptParts:
        """Return the parts of the prompt that are compared with the parts of an earlier prompt.

        Args:
            model: name of the model or adapter.
            num_tokens: tokens of the prompt.
        """
        has_system = self.messages[0]["role"] == "system"
        conversation = self.messages[1:] if has_system else self.messages
        return PromptParts(
            model,
            self.messages[0]["content"] if has_system else None,
            self.tools.definitions,
            conversation,
            self.documents,
            num_tokens,
        )


@dataclass(frozen=True, slots=True)
class MessagesOptions:
    """The options of a request, apart from its prompt.

    Attributes:
        model: the model or adapter.
        generate: the options of the completion, without token ids and stop strings.
        stops: stop strings.
        is_streamed: whether text is sent as it is generated.
        is_diagnosed: whether the response says why the prompt of an earlier message could not be reused.
        previous_message_id: the id of the earlier message; None if there is none.
    """

    model: str
    generate: GenerateRequest
    stops: tuple[str, ...]
    is_streamed: bool
    is_diagnosed: bool
    previous_message_id: str | None


def read_messages(fields: Fields) -> tuple[MessagesPrompt, MessagesOptions]:
    """Read a request to `/v1/messages`.

    Raises:
        InvalidRequest: the message names the field.
    """
    prompt = _read_prompt(fields)
    max_tokens = fields.integer("max_tokens", 0, _MAX_INT32)
    if max_tokens is None:
        raise InvalidRequest("max_tokens: expected an integer, got nothing")
    generate = GenerateRequest(
        max_new_tokens=max_tokens,
        temperature=fields.number("temperature", 0, 1, 1.0),
        top_k=fields.integer("top_k", 0, _MAX_INT32, 0),
        top_p=fields.number("top_p", 0, 1),
    )
    generate.prefill.salt = fields.text("cache_salt", "") or ""
    read_session(fields, generate.prefill)
    generate.prefill.session_id = generate.prefill.session_id or session_of_user(fields.any("metadata"))
    stops = fields.items("stop_sequences")
    if not all(isinstance(each, str) for each in stops):
        raise InvalidRequest("stop_sequences: expected a list of strings, got other values among them")
    _read_output_format(fields, generate)
    prompt.tools.require_possible(generate)
    diagnostics = fields.inner("diagnostics")
    options = MessagesOptions(
        model=fields.text("model", "") or "",
        generate=generate,
        stops=tuple(stops),
        is_streamed=fields.flag("stream"),
        is_diagnosed=diagnostics is not None,
        previous_message_id=None if diagnostics is None else diagnostics.text("previous_message_id"),
    )
    if diagnostics is not None:
        diagnostics.require_no_others()
    fields.require_neutral("this server has one tier of service", service_tier=("auto", "standard_only"))
    fields.require_neutral("this server has one speed", speed="standard")
    fields.require_no_others()
    return prompt, options


def read_prompt_only(fields: Fields) -> tuple[MessagesPrompt, str]:
    """Read a request to `/v1/messages/count_tokens`. Returns the prompt and the model or adapter.

    Raises:
        InvalidRequest: the message names the field.
    """
    prompt = _read_prompt(fields)
    model = fields.text("model", "") or ""
    fields.ignore("output_config")
    fields.require_no_others()
    return prompt, model


def _read_prompt(fields: Fields) -> MessagesPrompt:
    conversation = _Conversation()
    messages, breakpoints = conversation.messages, conversation.breakpoints
    tools = _read_tools(fields, breakpoints)
    system = fields.any("system")
    if system not in (None, "", []):
        conversation.add("system", system, "system")
    items = fields.items("messages")
    if not items:
        raise InvalidRequest("messages: expected at least one message, got none")
    for index, value in enumerate(items):
        message = Fields.of(value, f"messages[{index}]")
        role = message.one_of("role", ("user", "assistant"), "")
        if not role:
            raise InvalidRequest(f"{message.path_of('role')}: expected user or assistant, got nothing")
        conversation.add(role, message.any("content"), message.path_of("content"))
        message.require_no_others()
    for chat_message in messages:
        if not chat_message["content"]:
            chat_message["content"] = None if chat_message["role"] == "assistant" else ""
    if not messages or messages[-1]["role"] == "assistant":
        raise InvalidRequest(
            "messages: expected the last message to be from the user, since answers are not continued, got another one"
        )
    automatic_control = fields.any("cache_control")
    if automatic_control is not None:
        end_position = len(messages), len(messages[-1]["content"] or ())
        ttl_s = _ttl_s(automatic_control, "cache_control")
        if end_position not in {(each.num_messages, each.num_parts) for each in breakpoints}:
            breakpoints.append(Breakpoint(*end_position, ttl_s))
    if len(breakpoints) > MAX_BREAKPOINTS:
        raise InvalidRequest(f"cache_control: expected at most {MAX_BREAKPOINTS} breakpoints, got {len(breakpoints)}")
    if [each.ttl_s for each in breakpoints] != sorted((each.ttl_s for each in breakpoints), reverse=True):
        raise InvalidRequest("cache_control: expected breakpoints with the ttl 1h before those with 5m")
    return MessagesPrompt(messages, breakpoints, *_read_thinking(fields), tools, conversation.documents)


def _read_tools(fields: Fields, breakpoints: list[Breakpoint]) -> Tools:
    definitions: list[dict[str, Any]] = []
    for index, value in enumerate(fields.items("tools")):
        tool = Fields.of(value, f"tools[{index}]")
        if tool.text("type", "custom") != "custom":
            raise InvalidRequest(f"tools[{index}].type: expected custom, got a tool that Anthropic's servers run")
        function = {
            "name": tool.text("name"),
            "description": tool.text("description"),
            "parameters": tool.any("input_schema"),
            "strict": tool.flag("strict") or None,
        }
        if not function["name"] or not isinstance(function["parameters"], dict):
            raise InvalidRequest(f"tools[{index}]: expected a name and an input_schema, got nothing or other values")
        control = tool.any("cache_control")
        if control is not None:
            breakpoints.append(Breakpoint(0, 0, _ttl_s(control, f"tools[{index}].cache_control")))
        tool.ignore("eager_input_streaming")
        tool.require_neutral("the model sees all tools", defer_loading=False)
        tool.require_neutral("only the client runs tools", allowed_callers=(["direct"],))
        tool.require_neutral("describe them in the description", input_examples=([],))
        tool.require_no_others()
        function = {name: value for name, value in function.items() if value is not None}
        definitions.append({"type": "function", "function": function})

    choice = fields.inner("tool_choice")
    kind = "auto" if choice is None else choice.one_of("type", ("auto", "any", "tool", "none"), "auto")
    is_parallel = choice is None or not choice.flag("disable_parallel_tool_use")
    forced = None
    if choice is not None and kind == "tool":
        forced = choice.text("name")
        if not forced:
            raise InvalidRequest("tool_choice.name: expected the name of a tool, got nothing")
    if choice is not None:
        choice.require_no_others()

    # `Tools` calls both `required`; for a single tool, `forced` names it.
    kind = {"any": "required", "tool": "required"}.get(kind, kind)
    if not definitions:
        if kind == "required":
            raise InvalidRequest("tool_choice: expected tools to choose from, got none")
        return Tools()
    return Tools(definitions, kind, forced, is_parallel=is_parallel)


class _Conversation:
    """The messages of a request in the form of OpenAI's API.

    Consecutive messages of a role become one, as in Anthropic's API. The result of a tool becomes a message of its own.

    Attributes:
        messages: the messages, whose content is a list of parts.
        breakpoints: the breakpoints in the order of their positions.
        documents: the documents, which are not a part of the messages.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.breakpoints: list[Breakpoint] = []
        self.documents: list[dict[str, Any]] = []

    def add(self, role: str, content: Any, place: str) -> None:
        """Add the content of a message; `place` is its path in the request."""
        if isinstance(content, str):
            content = [{"type": "text", "text": content}] if content else []
        if not isinstance(content, list) or not content:
            raise InvalidRequest(f"{place}: expected text or a list of blocks, got nothing or another value")
        for index, value in enumerate(content):
            self._add_block(role, Fields.of(value, f"{place}[{index}]"))

    def _add_block(self, role: str, block: Fields) -> None:
        kind = block.text("type", "") or ""
        if kind == "text":
            self._message_of(role)["content"].append(_text_part(block))
        elif kind == "tool_use" and role == "assistant":
            self._message_of(role).setdefault("tool_calls", []).append(_tool_call(block))
        elif kind == "tool_result" and role == "user":
            self.messages.append(_tool_result(block))
        elif kind == "document" and role == "user":
            self._message_of(role)
            self.documents.append(_read_document(block))
        elif kind in ("thinking", "redacted_thinking") and role == "assistant":
            block.ignore("signature", "data")  # templates write earlier reasoning if the model needs it
            thinking = block.text("thinking", "")
            if thinking:
                message = self._message_of(role)
                message["reasoning_content"] = message.get("reasoning_content", "") + thinking
            return
        else:
            raise InvalidRequest(
                f"{block.path_of('type')}: expected a block of text, of tools or a document, since models are served "
                "for text only, got another type"
            )
        control = block.any("cache_control")
        if control is not None:
            ttl_s = _ttl_s(control, block.path_of("cache_control"))
            self.breakpoints.append(Breakpoint(len(self.messages), len(self.messages[-1]["content"]), ttl_s))
        block.ignore("citations", "caller")
        block.require_no_others()

    def _message_of(self, role: str) -> dict[str, Any]:
        """Return the last message if it has this role; otherwise append a new one, and return it."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
        return self.messages[-1]


def _text_part(block: Fields) -> dict[str, Any]:
    text = block.text("text")
    if not text:
        raise InvalidRequest(f"{block.path_of('text')}: expected text, got nothing")
    return {"type": "text", "text": text}


def _tool_call(block: Fields) -> dict[str, Any]:
    name, arguments = block.text("name"), block.any("input")
    if not name or not isinstance(arguments, dict):
        raise InvalidRequest(f"{block.place}: expected a name and an input, got nothing or other values")
    call = {"name": name, "arguments": arguments}
    return {"id": block.text("id", ""), "type": "function", "function": call}


def _tool_result(block: Fields) -> dict[str, Any]:
    content, place = block.any("content"), block.path_of("content")
    parts = []
    if isinstance(content, str):
        parts += [{"type": "text", "text": content}] if content else []
    elif isinstance(content, list):
        for index, value in enumerate(content):
            part = Fields.of(value, f"{place}[{index}]")
            if part.text("type") != "text":
                raise InvalidRequest(
                    f"{part.path_of('type')}: expected text, since models are served for text only, got another type"
                )
            parts.append(_text_part(part))
            part.ignore("citations", "cache_control")
    elif content is not None:
        raise InvalidRequest(f"{place}: expected text or a list of blocks, got another value")
    block.flag("is_error")
    return {"role": "tool", "tool_call_id": block.text("tool_use_id", ""), "content": parts}


def _read_document(block: Fields) -> dict[str, Any]:
    """Read a block of the type document, whose source must be plain text. Returns a document for the chat template."""
    source = block.inner("source")
    if source is None or source.text("type") != "text":
        raise InvalidRequest(
            f"{block.path_of('source')}.type: expected text, since models are served for text only, got another type; "
            "extract the text of the document"
        )
    source.require_neutral("extract the text of the document", media_type="text/plain")
    text = source.text("data")
    if not text:
        raise InvalidRequest(f"{source.path_of('data')}: expected text, got nothing")
    source.require_no_others()
    block.require_neutral("put it into the text of the document", context=())
    citations = block.inner("citations")
    if citations is not None:
        citations.require_neutral("this server cites no documents", enabled=False)
        citations.require_no_others()
    return {"title": block.text("title", "") or "", "text": text}


def _ttl_s(value: object, place: str) -> int:
    """Return the seconds of a `cache_control`."""
    control = Fields.of(value, place)
    control.one_of("type", ("ephemeral",), "ephemeral")
    seconds = _TTL_S[control.one_of("ttl", tuple(_TTL_S), "5m")]
    control.require_no_others()
    return seconds


def _read_thinking(fields: Fields) -> tuple[bool | None, int | None]:
    """Return whether the model may think, and for how many tokens; None if the request does not say."""
    thinking = fields.inner("thinking")
    if thinking is None:
        return None, None
    kind = thinking.one_of("type", ("enabled", "adaptive", "disabled"), "enabled")
    budget = thinking.integer("budget_tokens", 0, _MAX_INT32)
    thinking.ignore("display")
    thinking.require_no_others()
    return kind != "disabled", budget


def _read_output_format(fields: Fields, generate: GenerateRequest) -> None:
    """Read the JSON schema that the answer must follow, in `output_config.format`."""
    config = fields.inner("output_config")
    if config is None:
        return
    output_format = config.inner("format")
    config.require_neutral("this server does not control the effort", effort="high")
    config.require_no_others()
    if output_format is None:
        return
    output_format.one_of("type", ("json_schema",), "json_schema")
    schema = output_format.any("schema")
    if not isinstance(schema, dict):
        raise InvalidRequest("output_config.format.schema: expected a JSON schema, got another value")
    generate.json_schema = json.dumps(schema)
    output_format.require_no_others()
