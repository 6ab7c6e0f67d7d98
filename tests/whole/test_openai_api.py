"""OpenAI's API over HTTP with OpenAI's client: the same answers as over gRPC, cached and not."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from radixkv.service.client import Client, Tokenizer
from radixkv.v1.prefill_pb2 import FinishReason, GenerateResponse
from tests.patience import PATIENCE_S
from tests.whole.http_server import openai_client, post, serving_http

pytestmark = pytest.mark.usefixtures("forked_servers")

MODEL = "tiny"
TEXT = "You are a helpful assistant. Hello"
CHAT = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "Hello"}]
SAMPLED = {"temperature": 1.0, "seed": 7}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@dataclass
class Served:
    """A server's clients, its address over HTTP, and its tokenizer."""

    grpc: Client
    openai: openai.OpenAI
    url: str
    tokenizer: Tokenizer

    def complete_over_grpc(
        self, token_ids: list[int], n: int = 1, **options: Any
    ) -> list[tuple[str, GenerateResponse]]:
        """Return the text of each completion over gRPC, and its chunks merged into one response."""
        responses = [GenerateResponse() for _ in range(n)]
        for chunk in self.grpc.generate(token_ids, n=n, **options):
            responses[chunk.index].MergeFrom(chunk)
        return [(self.tokenizer.decode(response.token_ids), response) for response in responses]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with (
        serving_http() as (url, address),
        Client(address, timeout_s=PATIENCE_S) as client,
        openai_client(url) as api,
    ):
        yield Served(client, api, url, client.tokenizer())


# Options over HTTP, and the same options over gRPC.
OPTIONS = [
    ({"max_tokens": 12}, {"max_new_tokens": 12, "temperature": 1.0}),
    ({"max_tokens": 12, "temperature": 0}, {"max_new_tokens": 12}),
    ({"max_tokens": 20, "top_p": 0.5}, {"max_new_tokens": 20, "top_p": 0.5, "temperature": 1.0}),
    ({"max_tokens": 20, "n": 3}, {"max_new_tokens": 20, "n": 3, "temperature": 1.0}),
    (
        {"max_tokens": 20, "presence_penalty": 1.5, "frequency_penalty": -0.5},
        {"max_new_tokens": 20, "presence_penalty": 1.5, "frequency_penalty": -0.5, "temperature": 1.0},
    ),
    (
        {"max_tokens": 9, "logit_bias": {"65": 100}},
        {"max_new_tokens": 9, "logit_bias": {65: 100.0}, "temperature": 1.0},
    ),
    ({"max_tokens": 200, "stop": ["e", "zz"]}, {"max_new_tokens": 200, "stop": ["e", "zz"], "temperature": 1.0}),
    (
        {"max_tokens": 20, "extra_body": {"top_k": 5, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 20}},
        {
            "max_new_tokens": 20,
            "top_k": 5,
            "min_p": 0.01,
            "repetition_penalty": 1.2,
            "min_tokens": 20,
            "temperature": 1.0,
        },
    ),
    (
        {"max_tokens": 10, "extra_body": {"stop_token_ids": [101], "ignore_eos": True}},
        {"max_new_tokens": 10, "stop_token_ids": [101], "ignore_eos": True, "temperature": 1.0},
    ),
    (
        {"max_tokens": 10, "extra_body": {"structured_outputs": {"regex": "[a-c]{4}"}}},
        {"max_new_tokens": 10, "regex": "[a-c]{4}", "temperature": 1.0},
    ),
]


@pytest.mark.parametrize(("over_http", "over_grpc"), OPTIONS)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_completion_is_the_one_that_grpc_returns(
    served: Served, over_http: dict[str, Any], over_grpc: dict[str, Any], is_streamed: bool
) -> None:
    n = over_http.get("n", 1)
    expected = served.complete_over_grpc(served.tokenizer.encode(TEXT), seed=7, **over_grpc)
    options = {"model": MODEL, "prompt": TEXT, "seed": 7, **over_http}
    texts, reasons = [""] * n, [""] * n
    if is_streamed:
        for chunk in served.openai.completions.create(stream=True, **options):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    else:
        completion = served.openai.completions.create(**options)
        for choice in completion.choices:
            texts[choice.index], reasons[choice.index] = choice.text, choice.finish_reason
        assert completion.usage.completion_tokens == sum(len(response.token_ids) for _, response in expected)
        assert completion.usage.prompt_tokens == expected[0][1].usage.prompt_tokens
    for (expected_text, response), text, reason in zip(expected, texts, reasons, strict=True):
        stop = response.matched_stop
        assert text == (expected_text[: expected_text.index(stop)] if stop else expected_text)
        assert reason == ("stop" if response.finish_reason == FinishReason.STOP else "length")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_chat_is_rendered_by_the_template_of_the_model(served: Served, is_streamed: bool) -> None:
    ((expected, _),) = served.complete_over_grpc(served.tokenizer.encode_chat(CHAT), max_new_tokens=15, **SAMPLED)
    options: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_completion_tokens": 15, **SAMPLED}
    if not is_streamed:
        (choice,) = served.openai.chat.completions.create(**options).choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", expected, "length")
        return
    chunks = list(served.openai.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options))
    *deltas, last = chunks
    assert deltas[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in deltas) == expected
    assert [chunk.usage for chunk in deltas] == [None] * len(deltas)
    assert (last.choices, last.usage.completion_tokens) == ([], 15)
    assert len({chunk.id for chunk in chunks}) == 1


def test_without_a_maximum_a_chat_may_use_the_whole_context(served: Served) -> None:
    completion = served.openai.chat.completions.create(model=MODEL, messages=CHAT, stop=["\n", "e"], **SAMPLED)
    assert completion.choices[0].finish_reason == "stop"


def test_usage_counts_cached_and_written_tokens(served: Served) -> None:
    prompt = list(range(32, 127)) * 6

    def details(salt: str) -> dict[str, Any]:
        answer = served.openai.completions.create(
            model=MODEL, prompt=prompt, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage.prompt_tokens == len(prompt)
        return answer.usage.prompt_tokens_details.model_dump()

    cold, warm, other = details("one"), details("one"), details("two")
    assert (cold["cached_tokens"], cold["cache_write_tokens"], cold["miss_reason"]) == (0, len(prompt), "cold")
    assert (warm["cached_tokens"], warm["cache_write_tokens"], warm["miss_reason"]) == (len(prompt) - 1, 0, None)
    assert other["cached_tokens"] == 0


def test_a_request_for_no_tokens_caches_its_prompt(served: Served) -> None:
    messages = [{"role": "user", "content": "Which prompt is cached before it is needed? " * 8}]
    warmed = served.openai.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=0)
    assert (warmed.choices[0].message.content, warmed.choices[0].finish_reason) == ("", "length")
    assert warmed.usage.completion_tokens == 0
    usage = served.openai.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_several_prompts_are_answered_in_one_response(served: Served) -> None:
    prompts = ["one", "two", "three"]
    expected = [
        text
        for prompt in prompts
        for text, _ in served.complete_over_grpc(served.tokenizer.encode(prompt), n=2, max_new_tokens=6, **SAMPLED)
    ]
    options: dict[str, Any] = {"model": MODEL, "prompt": prompts, "n": 2, "max_tokens": 6, **SAMPLED}
    choices = served.openai.completions.create(**options).choices
    assert [(choice.index, choice.text) for choice in choices] == list(enumerate(expected))
    texts = [""] * 6
    for chunk in served.openai.completions.create(stream=True, **options):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_log_probabilities_are_those_of_grpc(served: Served) -> None:
    prompt = served.tokenizer.encode(TEXT)
    ((_, expected),) = served.complete_over_grpc(prompt, max_new_tokens=5, logprobs=3, temperature=0.0)
    completion = served.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=5, logprobs=3, temperature=0)
    logprobs = completion.choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx([row.logprob for row in expected.logprobs])
    assert logprobs.tokens == [served.tokenizer.decode([token_id]) for token_id in expected.token_ids]
    chat = served.openai.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=4, logprobs=True, top_logprobs=2, temperature=0
    )
    rows = chat.choices[0].logprobs.content
    assert [len(row.top_logprobs) for row in rows] == [2] * 4
    assert all(row.logprob == row.top_logprobs[0].logprob for row in rows)
    assert bytes(rows[0].bytes).decode() == rows[0].token


def test_a_token_that_is_part_of_a_character_is_reported_by_its_bytes(served: Served) -> None:
    options: dict[str, Any] = {"model": MODEL, "temperature": 0, "extra_body": {"structured_outputs": {"regex": "€😀"}}}
    chat = served.openai.chat.completions.create(messages=CHAT, logprobs=True, **options).choices[0]
    assert chat.message.content == "€😀"
    assert bytes(byte for row in chat.logprobs.content for byte in row.bytes).decode() == "€😀"
    completion = served.openai.completions.create(prompt="a", logprobs=0, **options).choices[0]
    assert completion.logprobs.tokens[0] == r"bytes:\xe2"


def test_streamed_offsets_are_those_of_the_whole_completion(served: Served) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "prompt": TEXT,
        "max_tokens": 20,
        "logprobs": 0,
        "stop": ["a b c", "the q"],
    }
    whole = served.openai.completions.create(**options, **SAMPLED).choices[0].logprobs
    chunks = list(served.openai.completions.create(stream=True, **options, **SAMPLED))
    assert [each for chunk in chunks for each in chunk.choices[0].logprobs.text_offset] == whole.text_offset


def test_an_answer_follows_a_schema(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}
    completion = served.openai.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=200, response_format=form, **SAMPLED
    )
    assert completion.choices[0].finish_reason == "stop", "the answer was cut off at the maximum number of tokens"
    assert isinstance(json.loads(completion.choices[0].message.content)["a"], int)


def test_the_model_is_listed(served: Served) -> None:
    (model,) = served.openai.models.list().data
    assert served.openai.models.retrieve(MODEL).id == model.id == MODEL
    with pytest.raises(openai.NotFoundError, match="this server serves the model tiny"):
        served.openai.models.retrieve("gpt-x")


def chat_with(**fields: object) -> tuple[str, object]:
    """Return the path and the body of a request for a chat completion."""
    return "/v1/chat/completions", {"model": MODEL, "messages": CHAT, **fields}


def completion_with(**fields: object) -> tuple[str, object]:
    """Return the path and the body of a request for a completion."""
    return "/v1/completions", {"model": MODEL, "prompt": "a", **fields}


TOOLS = [{"type": "function", "function": {"name": "a"}}]
IMAGE = [{"role": "user", "content": [{"type": "image_url"}]}]
TOO_LONG = "This model's maximum context length is exceeded"
FORMATS = "text, json_object, json_schema"
PROMPT_ERROR = "prompt: expected text, a list of token ids, or a list of these, got another value"

# The path and the body of a request, the status of the response, and the beginning of its message.
REFUSED: list[tuple[tuple[str, object], int, str]] = [
    (("/v1/chat/completions", b"{"), 400, "body: expected JSON, got 1 other bytes"),
    (("/v1/chat/completions", []), 400, "body: expected a JSON object, got other JSON"),
    (("/v1/chat/completions", {}), 400, "messages: expected at least one message, got none"),
    (("/v1/nothing", {}), 404, "POST /v1/nothing: Not Found"),
    (("/v1/models", {}), 405, "POST /v1/models: Method Not Allowed"),
    (chat_with(temperature=3), 400, "temperature: expected a number from 0 to 2, got 3"),
    (chat_with(temperature=True), 400, "temperature: expected a number from 0 to 2, got true"),
    (chat_with(typo=1), 400, "typo: this server does not know the field"),
    (chat_with(n=65), 400, "n: expected an integer from 1 to 64, got 65"),
    (chat_with(top_p=0), 400, "top_p: expected more than 0 and at most 1, got 0.0"),
    (chat_with(top_logprobs=2), 400, "top_logprobs: expected 0, got 2; it requires logprobs: true"),
    (chat_with(store=True), 400, "store: expected false, got true; this server stores no responses"),
    (chat_with(tools=TOOLS), 400, "tools: expected a model whose chat template writes calls of tools"),
    (chat_with(stream_options={}), 400, "stream_options: expected it only with stream: true"),
    (chat_with(response_format={"type": "xml"}), 400, f"response_format.type: expected one of {FORMATS}, got a string"),
    (chat_with(max_tokens=10**9), 400, f"{TOO_LONG}: messages, max_completion_tokens: expected at most"),
    (chat_with(model="gpt-x"), 404, "model: expected tiny or the name of a loaded adapter, got another name"),
    (chat_with(model="a" * 257), 400, "model: expected at most 256 characters, got 257"),
    (chat_with(messages=[{"content": "a"}]), 400, "messages[0].role: expected a role, got nothing"),
    (chat_with(verbosity="high"), 400, 'verbosity: expected "medium", got a string; this server does not control'),
    (chat_with(tool_choice={"type": "allowed_tools"}), 400, "tool_choice.allowed_tools: expected an object, got null"),
    (chat_with(messages=IMAGE), 400, "messages[0].content[0]: expected a part of the type text"),
    (completion_with(prompt=[]), 400, PROMPT_ERROR),
    (completion_with(prompt=[1, "a"]), 400, "prompt: expected token ids, got other values among them"),
    (completion_with(prompt=["a", 1]), 400, "prompt[1]: expected text or a list of token ids, got another value"),
    (completion_with(prompt=[1] * 140_000), 400, f"{TOO_LONG}: prompt: expected at most "),
    (completion_with(prompt=[-1]), 400, "prompt: expected token ids, got other values among them"),
    (completion_with(prompt=[2**31]), 400, "prompt[0]: expected an id below the vocabulary size"),
    (completion_with(prompt=["a"] * 65), 400, "prompt, n: expected at most 64 completions together, got 65"),
    (completion_with(echo=True), 400, "echo: expected false, got true; this server returns only new text"),
    (completion_with(stop=[""]), 400, "stop[0]: expected 1 to 256 characters, got 0"),
]


@pytest.mark.parametrize(("path_and_body", "status", "message"), REFUSED)
def test_a_bad_request_gets_a_clear_error(
    served: Served, path_and_body: tuple[str, object], status: int, message: str
) -> None:
    path, request = path_and_body
    received_status, body = post(served.url + path, request)
    assert (received_status, body["error"]["message"][: len(message)]) == (status, message)
    assert body["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


def test_a_stream_ends_with_done(served: Served) -> None:
    body = {"model": MODEL, "prompt": "a", "stream": True, "max_tokens": 3, "n": 2}
    request = urllib.request.Request(f"{served.url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        assert response.headers["content-type"] == "text/event-stream"
        events = response.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
