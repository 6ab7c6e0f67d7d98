"""Tools of a request: which the model may call, and whether it must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radixkv.errors import InvalidRequest
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.service.text.tool_calls import ToolCall, ToolCallText, tool_call_grammar
from radixkv.v1.prefill_pb2 import GenerateRequest


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request.

    Attributes:
        definitions: in the form of OpenAI's API, which chat templates expect.
        choice: `none`, `auto`, `required`, or the name of the tool that must be called.
        is_parallel: whether an answer may call several tools.
    """

    definitions: Sequence[Mapping[str, Any]] = ()
    choice: str = "none"
    is_parallel: bool = True

    @property
    def may_be_called(self) -> bool:
        """Whether the answer may contain calls."""
        return bool(self.definitions) and self.choice != "none"

    def constrain(self, generate: GenerateRequest) -> None:
        """Constrain an answer that must be a call.

        Raises:
            InvalidRequest: it is constrained already, or the tool that must be called is not defined.
        """
        if self.choice in ("none", "auto"):
            return
        functions = [each["function"] for each in self.definitions]
        called = [each for each in functions if self.choice in ("required", each["name"])]
        if not called:
            raise InvalidRequest("tool_choice: expected a tool of this request, got another one")
        if generate.WhichOneof("constraint") is not None:
            raise InvalidRequest("tool_choice, response_format: expected one of them, got both")
        is_parallel = self.is_parallel and self.choice == "required"
        generate.grammar = tool_call_grammar(called, is_parallel=is_parallel)

    def require_parser(self, tokenizer: Tokenizer) -> None:
        """Refuse tools whose calls cannot be recognized in the answers of the model.

        Raises:
            InvalidRequest: the message says what to do.
        """
        if self.may_be_called and not tokenizer.has_json_tool_calls:
            raise InvalidRequest(
                "tools: expected a model whose chat template writes calls as JSON between <tool_call> and "
                "</tool_call>, got another one, whose calls this server does not recognize; with tool_choice none, the "
                "model only sees the tools"
            )


class CompletionSplitter:
    """Splits the text of one completion, which arrives in pieces, into text and the calls that the request allows.

    White space around calls is left out. Without tools, all is text.

    Args:
        tools: the tools of the request.
    """

    def __init__(self, tools: Tools) -> None:
        self._parser = ToolCallText() if tools.may_be_called else None
        self._is_parallel = tools.is_parallel
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        """Whether there was a call so far."""
        return self._num_calls > 0

    def put(self, piece: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Add a piece. Returns the text that belongs to no call, and the calls that are complete."""
        if self._parser is None:
            return piece, []
        text, calls = self._parser.put(piece)
        if is_last:
            text += self._parser.end()
        if not self._is_parallel:
            calls = [] if self.has_calls else calls[:1]
        self._num_calls += len(calls)
        if calls:
            text = text.rstrip()
        return "" if self.has_calls and text.isspace() else text, calls
