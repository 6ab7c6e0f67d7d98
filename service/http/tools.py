"""Tools of a request: which the model may call, and whether it must."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from radixkv.errors import InvalidRequest
from radixkv.service.http.breakpoints import Breakpoint, RetainedRange, retained_ranges
from radixkv.service.structured.grammar_text import MAX_CHARS, GrammarText
from radixkv.service.text.answer_format import AnswerFormat, AnswerParts
from radixkv.service.text.answer_grammar import calls_or_answer, forced_calls, strict_calls
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.v1.hints_pb2 import Awaits
from radixkv.v1.prefill_pb2 import GenerateRequest

# Variables of chat templates that switch reasoning on and off.
_SWITCH_VARIABLES = ("enable_thinking", "thinking")
_EFFORT_VARIABLE = "reasoning_effort"
_JSON_CONSTRAINTS = ("json_schema", "json_object")  # constraints of an answer that must be JSON
_MAX_TAG_CHARS = 64  # more than a tag of reasoning has, with the white space after it
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request.

    Attributes:
        definitions: in the form of OpenAI's API, which chat templates expect.
        choice: `none`, `auto` (the model decides whether to call a tool), or `required`.
        forced: the name of the tool that must be called; None if no specific tool must be called.
        allowed: the names of the tools that may be called; None for all. The prompt contains the other tools as well.
        is_parallel: whether an answer may call several tools.
    """

    definitions: Sequence[Mapping[str, Any]] = ()
    choice: str = "none"
    forced: str | None = None
    allowed: Collection[str] | None = None
    is_parallel: bool = True

    @property
    def may_be_called(self) -> bool:
        """Whether the answer may contain calls."""
        return bool(self.definitions) and self.choice != "none"

    @property
    def functions(self) -> list[Mapping[str, Any]]:
        """The functions that may be called, each with `name` and `parameters`."""
        functions = [each["function"] for each in self.definitions]
        names = self.allowed if self.forced is None else (self.forced,)
        return functions if names is None else [each for each in functions if each["name"] in names]

    def require_possible(self, generate: GenerateRequest) -> None:
        """Refuse a request whose tools cannot be called as it requests.

        Raises:
            InvalidRequest: none of the tools that may be called is defined, or the answer must be a call and the
                request constrains it in another way.
        """
        if self.may_be_called and not self.functions:
            raise InvalidRequest("tool_choice: expected a tool of this request, got another one")
        if self.choice != "required":
            return
        if generate.WhichOneof("constraint") is not None:
            raise InvalidRequest("tool_choice, response_format: expected one of them, got both")

    def require_format(self, form: AnswerFormat) -> None:
        """Refuse tools whose calls cannot be recognized in the answers of the model.

        Raises:
            InvalidRequest: the message says what to do.
        """
        if self.may_be_called and form.tool_format is None:
            raise InvalidRequest(
                "tools: expected a model whose chat template writes calls of tools in a format that this server knows, "
                "got another one; server.tool_format names the format, and with tool_choice none, the model only sees "
                "the tools"
            )


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A conversation as token ids, and how the model writes its answer.

    Attributes:
        token_ids: the prompt.
        form: how the model writes its answers.
        tools: the tools that the model may call.
        is_open: whether the prompt ends with the beginning of reasoning; None if no reasoning may follow.
        is_text: whether the answer is only text, because the request constrains it.
        ranges: the ranges of the prompt that should be retained.
    """

    token_ids: list[int]
    form: AnswerFormat
    tools: Tools
    is_open: bool | None
    is_text: bool = False
    ranges: Sequence[RetainedRange] = ()

    @classmethod
    def encode(cls, text: str, tokenizer: Tokenizer, form: AnswerFormat, tools: Tools) -> EncodedChat:
        """Encode a rendered conversation."""
        is_open: bool | None = None
        prompt_end = text[-_MAX_TAG_CHARS:].rstrip()
        if form.reasoning is not None and not prompt_end.endswith(form.reasoning.end):
            is_open = prompt_end.endswith(form.reasoning.begin)
        return cls(tokenizer.encode_rendered(text), form, tools, is_open)

    def with_ranges(
        self,
        breakpoints: Sequence[Breakpoint],
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        render: Callable[..., str],
    ) -> EncodedChat:
        """Return this conversation with the ranges of tokens before breakpoints.

        Args:
            breakpoints: in the order of their positions.
            messages: the conversation.
            tokenizer: tokenizer of the model.
            render: renders messages; see `Tokenizer.render_chat`.
        """

        def encode(shortened: Sequence[Mapping[str, Any]]) -> list[int]:
            return tokenizer.encode_rendered(render(shortened, add_generation_prompt=False))

        return replace(self, ranges=retained_ranges(breakpoints, messages, self.token_ids, encode))

    @property
    def has_parts(self) -> bool:
        """Whether the answer may contain reasoning or calls."""
        return not self.is_text and (self.form.reasoning is not None or self.tools.may_be_called)

    @property
    def shown_tags(self) -> dict[int, str]:
        """The special tokens whose text is needed to read the answer, by their ids."""
        return {token_id: tag for tag, token_id in self.form.tags.items()} if self.has_parts else {}

    def constrain(self, generate: GenerateRequest) -> EncodedChat:
        """Add to the options of a request what its tools and its reasoning require, above all a grammar.

        An answer that must be JSON may consist of calls instead, and may follow reasoning that the prompt begins. If
        neither is possible, and with any other constraint of the request, the answer is only text.

        Args:
            generate: the options of the request; changed.

        Returns:
            The conversation, with `is_text` if the answer is only text.

        Raises:
            InvalidRequest: the schemas are too long for a grammar, or that of the answer is not a JSON schema.
        """
        tools = self.tools
        if tools.may_be_called and self.form.tool_format is not None:
            generate.tool_call_begin = self.form.call_begin
        if tools.choice == "required":
            generate.prefill.awaits = Awaits.AWAITS_TOOL
        elif self.is_open is not None and not tools.may_be_called:
            # Templates leave reasoning out of the next prompt, except between calls.
            generate.write_generated = False

        is_parallel = tools.is_parallel and tools.forced is None
        kind = generate.WhichOneof("constraint")
        if kind in _JSON_CONSTRAINTS and (tools.may_be_called or self.is_open):
            schema = generate.json_schema if kind == "json_schema" else '{"type": "object"}'
            answer_expression = GrammarText(kind, "json_schema", schema).json_expression()
            functions = tools.functions if tools.may_be_called else []
            generate.grammar = calls_or_answer(
                self.form, functions, answer_expression, is_parallel=is_parallel, is_open=self.is_open or None
            )
        elif kind is not None:
            return replace(self, is_text=True)
        elif tools.choice == "required":
            generate.grammar = forced_calls(self.form, tools.functions, is_parallel=is_parallel, is_open=self.is_open)
        elif tools.may_be_called and (tools.allowed is not None or any(each.get("strict") for each in tools.functions)):
            # Only calls of strict functions must follow the schema of the function's arguments.
            any_arguments = {"parameters": {"type": "object"}}
            functions = [each if each.get("strict") else {**each, **any_arguments} for each in tools.functions]
            generate.grammar = strict_calls(self.form, functions, is_parallel=is_parallel, is_open=self.is_open)
        if len(generate.grammar) > MAX_CHARS["grammar"]:
            raise InvalidRequest(
                "tools, response_format: expected schemas whose grammar has at most "
                f"{MAX_CHARS['grammar']} characters, got {len(generate.grammar)}; send fewer tools, or none of "
                "response_format, tool_choice and strict"
            )
        return self

    def answer_parts(self) -> AnswerParts:
        """Return a reader that splits one answer into text, reasoning and calls."""
        tools = self.tools
        if self.is_text:
            return AnswerParts()
        return AnswerParts(
            self.form.reasoning,
            is_open=bool(self.is_open),
            tools=self.form.tool_format if tools.may_be_called else None,
            functions=tools.functions,
            is_parallel=tools.is_parallel,
        )


def reasoning_variables(tokenizer: Tokenizer, form: AnswerFormat, effort: str) -> dict[str, Any]:
    """Return the template variables for a `reasoning_effort`.

    Args:
        tokenizer: tokenizer of the model.
        form: how the model writes its answers.
        effort: `none` for an answer without reasoning, or how much of it there should be.

    Raises:
        InvalidRequest: the effort is unknown, or the model does not support it.
    """
    if tokenizer.has_template_variable(_EFFORT_VARIABLE):
        return {_EFFORT_VARIABLE: effort}
    if effort not in _EFFORTS:
        raise InvalidRequest(f"reasoning_effort: expected one of {', '.join(_EFFORTS)}, got another name")
    switch = reasoning_switch(tokenizer)
    if switch is not None:
        return {switch: effort != "none"}
    only_effort = "none" if form.reasoning is None else "medium"
    if effort != only_effort:
        how_often = "never" if form.reasoning is None else "always"
        raise InvalidRequest(
            f"reasoning_effort: expected {only_effort}, since this model {how_often} reasons, got {effort}"
        )
    return {}


def reasoning_switch(tokenizer: Tokenizer) -> str | None:
    """Return the template variable that switches reasoning on and off; None if there is none."""
    return next((each for each in _SWITCH_VARIABLES if tokenizer.has_template_variable(each)), None)
