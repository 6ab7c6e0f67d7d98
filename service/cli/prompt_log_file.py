"""Reads a log of prompts: JSON lines with token ids, texts, or bodies of requests to OpenAI's or Anthropic's API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from radixkv.api.explanation import PromptSegment, require_segments
from radixkv.api.miss_reason import MissReason
from radixkv.api.retention import Retention
from radixkv.doctor.prompt_log import LoggedPrompt, PromptLog, ReportedReuse, SegmentOf, segment_lookup
from radixkv.errors import ConfigError, InvalidRequest, RadixKVError
from radixkv.namespace import Namespace
from radixkv.planning.trace_records import Record
from radixkv.service.text.rendered_segments import plain_parts, segments_of, segments_of_parts

if TYPE_CHECKING:
    from radixkv.service.text.tokenizer import Tokenizer

# The names that a field may have, by what it contains. The first name that a record has counts.
_BODIES = ("body", "request", "payload")
_TOKENS = ("token_ids", "prompt_token_ids", "input_ids", "prompt")
_TEXTS = ("text", "prompt", "input")
_TIMES = ("timestamp", "time", "created", "created_at", "ts")
_SESSIONS = ("session_id", "session", "conversation_id")
_ANSWERS = ("output_token_ids", "answer_token_ids")
_SALTS = ("salt", "cache_salt")
# Fields of a request to /v1/messages that its prompt is read from.
_ANTHROPIC_FIELDS = ("model", "system", "messages", "tools", "tool_choice", "thinking")
# Types of content blocks that only requests to /v1/messages have.
_ANTHROPIC_BLOCKS = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking", "document"})
_MIN_CLOCK_MS = 1e11  # timestamps above this value are in milliseconds, others in seconds
_MAX_TOKEN = 2**32

GetTokenizer = Callable[[], "Tokenizer"]


class RejectedConversation(Exception):
    """A conversation is not valid, or the chat template rejects it. The message has its place and the reason."""


class _EncodedPrompt(NamedTuple):
    token_ids: Sequence[int]
    segment_of: SegmentOf | None


@dataclass
class PromptLogReader:
    """Reads the records of a log into a `PromptLog`.

    Args:
        log: the log that the prompts are added to.
        tokenizer: returns the tokenizer; called only for texts and conversations.
        has_bytes: whether the bytes of texts are their token ids.
        is_plain: whether conversations are written in a plain form, without the chat template.

    Attributes:
        has_text: whether the log contains texts or chats. The tokenizer has encoded them, so it can decode its tokens.
    """

    log: PromptLog
    tokenizer: GetTokenizer
    has_bytes: bool = False
    is_plain: bool = False
    has_text: bool = False
    _start_s: float | None = None

    def add(self, record: Record) -> None:
        """Add the prompt of a record.

        Raises:
            ConfigError: the record has no prompt, or a field is wrong. The message names the line and the field.
            RejectedConversation: the conversation is not valid, or the chat template rejects it.
        """
        where, fields = record
        if not isinstance(fields, dict):
            raise ConfigError(f"{where}: expected a JSON object, got another JSON value")
        body = next((fields[each] for each in _BODIES if isinstance(fields.get(each), dict)), fields)
        body = _with_messages(body)
        all_fields = {**body, **fields} if body is not fields else fields
        encoded = self._encode(where, body)
        answer = _first(all_fields, _ANSWERS)
        namespace = Namespace(
            _text(all_fields, ("model",), where),
            _text(all_fields, ("tenant",), where),
            _text(all_fields, ("adapter",), where),
            _text(all_fields, _SALTS, where),
        )
        prompt = LoggedPrompt(
            where,
            len(encoded.token_ids),
            namespace,
            _session(all_fields, where),
            self._time_s(all_fields, where),
            _segments(all_fields, where, len(encoded.token_ids)) or encoded.segment_of,
            _retention(all_fields, where),
            _reported_reuse(all_fields, where),
        )
        # The last generated token is not cached.
        answer_ids = [] if answer is None else _token_ids(answer, where, "output_token_ids")[:-1]
        self.log.add(prompt, encoded.token_ids, answer_ids)

    def _encode(self, where: str, body: Mapping[str, Any]) -> _EncodedPrompt:
        tokens = next((body[each] for each in _TOKENS if isinstance(body.get(each), list)), None)
        if tokens is not None and not (tokens and isinstance(tokens[0], dict)):
            name = next(each for each in _TOKENS if body.get(each) is tokens)
            if not tokens:
                raise ConfigError(f"{where}: {name}: expected at least one token id, got none")
            return _EncodedPrompt(_token_ids(tokens, where, name), None)
        text = next((body[each] for each in _TEXTS if isinstance(body.get(each), str) and body[each]), None)
        if text is not None:
            if self.has_bytes:
                return _EncodedPrompt(list(text.encode()), None)
            self.has_text = True
            return _EncodedPrompt(self.tokenizer().encode(text), None)
        if not isinstance(body.get("messages"), list):
            got = ", ".join(map(str, list(body)[:8])) or "none"
            raise ConfigError(
                f"{where}: expected a prompt in one of the fields token_ids, text, prompt and messages, got fields: "
                f"{got}"
            )
        if self.has_bytes:
            raise ConfigError(f"{where}: messages: expected a tokenizer for a conversation, got --bytes")
        self.has_text = True
        if self.is_plain:
            return _encode_plainly(self.tokenizer(), body)
        try:
            return _encode_chat(self.tokenizer(), body)
        except (InvalidRequest, TypeError, ValueError) as error:
            raise RejectedConversation(f"{where}: {error}") from error

    def _time_s(self, fields: Mapping[str, Any], where: str) -> float | None:
        value = _first(fields, _TIMES)
        if value is None:
            return None
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value).timestamp()
            except ValueError:
                raise ConfigError(f"{where}: timestamp: expected seconds or ISO 8601, got other text") from None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63:
            raise ConfigError(f"{where}: timestamp: expected seconds of at least 0, got another value")
        time_s = value / 1000 if value > _MIN_CLOCK_MS else float(value)
        self._start_s = time_s if self._start_s is None else self._start_s
        return max(0.0, time_s - self._start_s)


def is_prompt(value: object) -> bool:
    """Return whether a record is a prompt, and not a request of a trace or an event."""
    if not isinstance(value, dict) or "hash_ids" in value or "block_hashes" in value:
        return False
    body = next((value[each] for each in _BODIES if isinstance(value.get(each), dict)), value)
    names = {*_TOKENS, *_TEXTS, "messages"}
    return any(isinstance(body.get(each), str | list) for each in names) and "hash_ids" not in body


def _with_messages(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body of a request. If it is a request to /v1/responses, its input items become messages."""
    items = body.get("input")
    if not isinstance(items, list) or not items or not isinstance(items[0], dict):
        return body
    instructions = body.get("instructions")
    system_messages = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    other_fields = {name: value for name, value in body.items() if name != "input"}
    return {**other_fields, "messages": [*system_messages, *items]}


def _encode_chat(tokenizer: Tokenizer, body: Mapping[str, Any]) -> _EncodedPrompt:
    messages, tools, documents = body["messages"], body.get("tools") or None, body.get("documents") or None
    if _is_anthropic(body):
        from radixkv.service.http.anthropic_requests import read_prompt_only
        from radixkv.service.http.json_fields import Fields

        prompt, _ = read_prompt_only(Fields({name: body[name] for name in _ANTHROPIC_FIELDS if name in body}))
        messages, documents = prompt.messages, prompt.documents or None
        tools = prompt.tools.definitions or None
    variables = body.get("chat_template_kwargs") or None

    def render(shown_tools: Sequence[Mapping[str, Any]] | None) -> str:
        return tokenizer.render_chat(messages, tools=shown_tools, documents=documents, chat_template_kwargs=variables)

    text = render(tools)
    text_without_tools = text if tools is None else render(None)
    ids, ends = tokenizer.encode_with_ends(text)
    return _EncodedPrompt(ids, segments_of(messages, text, text_without_tools, ends))


def _encode_plainly(tokenizer: Tokenizer, body: Mapping[str, Any]) -> _EncodedPrompt:
    parts = plain_parts(body)
    ids, ends = tokenizer.encode_with_ends("".join(part.text for part in parts))
    return _EncodedPrompt(ids, segments_of_parts(parts, ends))


def _is_anthropic(body: Mapping[str, Any]) -> bool:
    """Return whether a body is that of a request to /v1/messages; OpenAI's API would not accept such a body."""
    if body.get("system") is not None or any("input_schema" in each for each in body.get("tools") or ()):
        return True
    contents = [each.get("content") for each in body["messages"] if isinstance(each, dict)]
    for content in contents:
        blocks = content if isinstance(content, list) else []
        if any(isinstance(block, dict) and block.get("type") in _ANTHROPIC_BLOCKS for block in blocks):
            return True
    return False


def _first(fields: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((fields[each] for each in names if fields.get(each) is not None), None)


def _text(fields: Mapping[str, Any], names: Sequence[str], where: str) -> str:
    value = _first(fields, names)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{where}: {names[0]}: expected text, got another JSON value")
    return value or ""


def _session(fields: Mapping[str, Any], where: str) -> str:
    from radixkv.service.http.sessions import session_of_user

    return _text(fields, _SESSIONS, where) or session_of_user(fields.get("metadata"))


def _token_ids(values: Any, where: str, name: str) -> list[int]:
    is_list = isinstance(values, list)
    if not is_list or any(type(each) is not int or not 0 <= each < _MAX_TOKEN for each in values):
        raise ConfigError(f"{where}: {name}: expected a list of integers in [0, 2**32), got other values")
    token_ids: list[int] = values
    return token_ids


def _segments(fields: Mapping[str, Any], where: str, num_tokens: int) -> SegmentOf | None:
    values = fields.get("segments")
    if values is None:
        return None
    try:
        segments = []
        for each in values:
            if isinstance(each, dict):
                name, end = each["name"], each["end"] if "end" in each else each["end_token"]
            else:
                name, end = each
            segments.append(PromptSegment(str(name), int(end)))
        require_segments(segments)
    except (TypeError, ValueError, KeyError, RadixKVError):
        raise ConfigError(
            f"{where}: segments: expected a list of objects with `name` and `end`, in order, got other values"
        ) from None
    return segment_lookup(segments) if num_tokens else None


def _retention(fields: Mapping[str, Any], where: str) -> Retention | None:
    value = fields.get("retention")
    if value is None:
        return None
    try:
        ttl_s = value.get("ttl_s")
        retention = Retention(int(value["priority"]), None if ttl_s is None else float(ttl_s))
        retention.require_valid()
    except (AttributeError, KeyError, TypeError, ValueError, RadixKVError):
        raise ConfigError(
            f"{where}: retention: expected an object with `priority` (0 to 100) and `ttl_s`, got other values"
        ) from None
    return retention


def _reported_reuse(fields: Mapping[str, Any], where: str) -> ReportedReuse | None:
    cached, reason = fields.get("cached_tokens"), fields.get("miss_reason")
    if cached is None or reason is None:
        return None
    if type(cached) is not int or cached < 0:
        raise ConfigError(f"{where}: cached_tokens: expected an integer of at least 0, got another value")
    try:
        return ReportedReuse(cached, MissReason(reason))
    except ValueError:
        expected = ", ".join(each.value for each in MissReason)
        raise ConfigError(f"{where}: miss_reason: expected one of {expected}, got another value") from None
