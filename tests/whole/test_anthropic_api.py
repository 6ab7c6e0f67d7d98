"""Anthropic's API over HTTP with Anthropic's client: the same answers as over gRPC, breakpoints and usage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import pytest

from radixkv.service.client import Client, Tokenizer
from tests.patience import PATIENCE_S
from tests.whole.http_server import anthropic_client, post, serving_http

pytestmark = pytest.mark.usefixtures("forked_servers")

MODEL = "tiny"
SYSTEM = "You are a helpful assistant who answers questions about gardens. " * 6
HELLO = [{"role": "user", "content": "Hello"}]


@dataclass
class Served:
    """A server's clients, its address over HTTP, and its tokenizer."""

    grpc: Client
    anthropic: anthropic.Anthropic
    url: str
    tokenizer: Tokenizer

    def generate_over_grpc(self, messages: list[dict[str, Any]], **options: Any) -> str:
        """Return the text that the server generates after a chat."""
        chunks = self.grpc.generate(self.tokenizer.encode_chat(messages), **options)
        return self.tokenizer.decode([token_id for chunk in chunks for token_id in chunk.token_ids])


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with (
        serving_http() as (url, address),
        Client(address, timeout_s=PATIENCE_S) as client,
        anthropic_client(url) as api,
    ):
        yield Served(client, api, url, client.tokenizer())


def block(text: str, ttl: str | None = None) -> dict[str, Any]:
    """Return a block of text, with a breakpoint after it if it has a time to live."""
    return {"type": "text", "text": text, **({"cache_control": {"type": "ephemeral", "ttl": ttl}} if ttl else {})}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_message_is_the_completion_that_grpc_returns(served: Served, is_streamed: bool) -> None:
    rendered = [{"role": "system", "content": SYSTEM}, *HELLO]
    expected = served.generate_over_grpc(rendered, max_new_tokens=15)
    options: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 15,
        "system": SYSTEM,
        "messages": HELLO,
        "extra_body": {"temperature": 0},
    }
    if is_streamed:
        with served.anthropic.messages.stream(**options) as stream:
            assert "".join(stream.text_stream) == expected
            message = stream.get_final_message()
    else:
        message = served.anthropic.messages.create(**options)
    assert [(each.type, each.text) for each in message.content] == [("text", expected)]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "max_tokens", None)
    assert message.usage.output_tokens == 15


def test_a_stop_sequence_ends_the_text(served: Served) -> None:
    expected = served.generate_over_grpc(HELLO, max_new_tokens=60)
    stop = expected[10:13]
    message = served.anthropic.messages.create(
        model=MODEL, max_tokens=60, messages=HELLO, extra_body={"temperature": 0}, stop_sequences=[stop]
    )
    assert message.content[0].text == expected[: expected.index(stop)]
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_consecutive_messages_of_a_user_are_one(served: Served) -> None:
    two = [*HELLO, {"role": "user", "content": [block("How are you?")]}]
    joined = [{"role": "user", "content": [block("Hello"), block("How are you?")]}]
    counts = [served.anthropic.messages.count_tokens(model=MODEL, messages=each).input_tokens for each in (two, joined)]
    assert counts[0] == counts[1] == len(served.tokenizer.encode_chat(joined))


def usage_of(served: Served, salt: str, **options: Any) -> tuple[int, int, int, int, int]:
    """Send a message, and return the numbers of tokens in its usage.

    Returns:
        Input tokens that were neither created nor read, tokens created for five minutes, tokens created for an hour,
        tokens read, and output tokens.
    """
    usage = served.anthropic.messages.create(
        model=MODEL, max_tokens=1, extra_body={"cache_salt": salt}, **options
    ).usage
    created = usage.cache_creation
    assert usage.cache_creation_input_tokens == created.ephemeral_5m_input_tokens + created.ephemeral_1h_input_tokens
    return (
        usage.input_tokens,
        created.ephemeral_5m_input_tokens,
        created.ephemeral_1h_input_tokens,
        usage.cache_read_input_tokens,
        usage.output_tokens,
    )


def test_usage_reports_created_and_read_tokens(served: Served) -> None:
    system = [block(SYSTEM, "1h")]
    first = [{"role": "user", "content": [block("Which plants like shade? " * 4, "5m")]}]
    total = len(served.tokenizer.encode_chat([{"role": "system", "content": system}, *first]))
    uncached, five_minutes, hour, read, _ = usage_of(served, "usage", system=system, messages=first)
    assert (uncached + five_minutes + hour + read, read) == (total, 0)
    assert min(five_minutes, hour) > 0
    assert uncached < 10, "the tokens with which the chat template begins the answer"
    num_system_tokens = hour

    *_, read, _ = usage_of(served, "usage", system=system, messages=first)
    assert read == total - 1

    other = [{"role": "user", "content": [block("And which ones like the sun? " * 4, "5m")]}]
    _, five_minutes, hour, read, _ = usage_of(served, "usage", system=system, messages=other)
    assert read >= num_system_tokens
    assert five_minutes > 0
    assert hour == 0


def test_a_breakpoint_retains_the_prompt(served: Served) -> None:
    before = served.grpc.stats().blocks.retained
    messages = [{"role": "user", "content": [block("Keep this for an hour. " * 40)]}]
    served.anthropic.messages.create(
        model=MODEL, max_tokens=1, messages=messages, cache_control={"type": "ephemeral", "ttl": "1h"}
    )
    assert served.grpc.stats().blocks.retained > before


def test_a_request_for_no_tokens_caches_its_prompt(served: Served) -> None:
    messages = [{"role": "user", "content": "Warm this up before it is needed. " * 8}]
    warmed = served.anthropic.messages.create(model=MODEL, max_tokens=0, messages=messages)
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
    usage = served.anthropic.messages.create(model=MODEL, max_tokens=1, messages=messages).usage
    assert usage.input_tokens == 1


def message_with(**fields: object) -> tuple[str, object]:
    """Return the path and the body of a request for a message."""
    return "/v1/messages", {"model": MODEL, "max_tokens": 4, "messages": HELLO, **fields}


LONG_AFTER_SHORT = [{"role": "user", "content": [block("a", "5m"), block("b", "1h")]}]
FIVE_BREAKPOINTS = [{"role": "user", "content": [block("a", "5m")] * 5}]
TOOL_CALL_OF_USER = [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {}}]}]
TEXT_SOURCE = {"type": "text", "media_type": "text/plain", "data": "Roses."}
DOCUMENT = [{"role": "user", "content": [{"type": "document", "source": TEXT_SOURCE}, block("So?")]}]
TOOLS = [{"name": "a", "input_schema": {"type": "object"}}]
# A path and a body, the status of the response, and the beginning of its error message.
REFUSED: list[tuple[tuple[str, object], int, str]] = [
    (("/v1/messages", b"["), 400, "body: expected JSON, got 1 other bytes"),
    (("/v1/messages/batches", {}), 404, "POST /v1/messages/batches: Not Found"),
    (message_with(max_tokens=None), 400, "max_tokens: expected an integer, got nothing"),
    (message_with(max_tokens=10**9), 400, "input length and max_tokens exceed context limit: messages, max_tok"),
    (message_with(messages=[]), 400, "messages: expected at least one message, got none"),
    (message_with(messages=[{"role": "tool"}]), 400, "messages[0].role: expected one of user, assistant, got a string"),
    (message_with(messages=[{"role": "assistant", "content": "a"}]), 400, "messages: expected the last message to be"),
    (message_with(messages=FIVE_BREAKPOINTS), 400, "cache_control: expected at most 4 breakpoints, got 5"),
    (message_with(messages=LONG_AFTER_SHORT), 400, "cache_control: expected breakpoints with the ttl 1h before"),
    (message_with(cache_control={"ttl": "2h"}), 400, "cache_control.ttl: expected one of 5m, 1h, got a string"),
    (
        message_with(messages=TOOL_CALL_OF_USER),
        400,
        "messages[0].content[0].type: expected a block of text, of tools or a docume",
    ),
    (message_with(tools=[{"name": "a"}]), 400, "tools[0]: expected a name and an input_schema, got nothing or other"),
    (message_with(tools=TOOLS), 400, "tools: expected a model whose chat template writes calls of tools"),
    (message_with(tools=[{"type": "bash_20250124", "name": "bash"}]), 400, "tools[0].type: expected custom, got a"),
    (
        message_with(tools=[{**TOOLS[0], "defer_loading": True}]),
        400,
        "tools[0].defer_loading: expected false, got true",
    ),
    (message_with(output_config={"effort": "low"}), 400, 'output_config.effort: expected "high", got a string'),
    (message_with(stop_sequences=[""]), 400, "stop_sequences[0]: expected 1 to 256 characters, got 0"),
    (message_with(model="a" * 257), 400, "model: expected at most 256 characters, got 257"),
    (message_with(temperature=1.5), 400, "temperature: expected a number from 0 to 1, got 1.5"),
    (message_with(thinking={"type": "enabled"}), 400, "thinking.type: this model never reasons, since its chat"),
    (message_with(model="claude-x"), 404, "model: expected tiny or the name of a loaded adapter, got another name"),
    (message_with(messages=DOCUMENT), 400, "documents: the model's chat template drops documents: send them as text"),
    (message_with(typo=1), 400, "typo: this server does not know the field"),
]


@pytest.mark.parametrize(("path_and_body", "status", "message"), REFUSED)
def test_a_bad_request_gets_a_clear_error(
    served: Served, path_and_body: tuple[str, object], status: int, message: str
) -> None:
    path, request = path_and_body
    received_status, body = post(served.url + path, request)
    assert (received_status, body["error"]["message"][: len(message)]) == (status, message)
    assert body["type"] == "error"
    assert body["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


@pytest.mark.parametrize("system", ["", []])
def test_an_empty_system_prompt_counts_as_absent(served: Served, system: Any) -> None:
    count_tokens = served.anthropic.messages.count_tokens
    expected = count_tokens(model=MODEL, messages=HELLO).input_tokens
    assert count_tokens(model=MODEL, messages=HELLO, system=system).input_tokens == expected


def test_thinking_may_be_disabled_for_a_model_without_it(served: Served) -> None:
    message = served.anthropic.messages.create(
        model=MODEL, max_tokens=2, messages=HELLO, thinking={"type": "disabled"}, extra_body={"temperature": 0}
    )
    assert message.content[0].text == served.generate_over_grpc(HELLO, max_new_tokens=2)
