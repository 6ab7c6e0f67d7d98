"""Two servers behind SMG, a gateway that speaks the API of OpenAI and routes by the events of the servers.

The tests check results, reuse, clients that disconnect, and servers that are killed or restarted.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import openai
import pytest

from bench.parts.gateway_process import GatewayProcess, num_healthy_servers
from bench.parts.server_process import ServerProcess, serve_command
from radixkv.service.client import Client
from tests.patience import PATIENCE_S, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        (sys.platform, platform.machine()) != ("linux", "x86_64"),
        reason="the gateway is built for Linux on x86-64 alone",
    ),
    pytest.mark.usefixtures("forked_servers"),
]

SETTINGS = ("gateway.enabled=true", "gateway.tenant=gate", "cache.capacity_tokens=16384", "server.drain_timeout_s=1")
MODEL = "tiny"
INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # the text of bytes whose character is not complete


@dataclass
class Fleet:
    """Two servers behind the gateway. The last test kills one of them."""

    url: str
    metrics_url: str
    servers: list[ServerProcess]
    addresses: list[str]
    client: Any

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send JSON to the gateway, and return the JSON of the response."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            return json.load(response)

    def stats(self) -> list[Any]:
        """Return the statistics of every running server."""
        stats = []
        for server, address in zip(self.servers, self.addresses, strict=True):
            if server.is_running:
                with Client(address, timeout_s=PATIENCE_S) as client:
                    stats.append(client.stats())
        return stats

    def num_known_blocks(self) -> int:
        """Return the number of cached blocks that the gateway knows of."""
        with urllib.request.urlopen(self.metrics_url, timeout=PATIENCE_S) as response:
            counts = re.findall(r"^smg_kv_index_blocks\{.*\} (\d+)$", response.read().decode(), re.MULTILINE)
        return sum(map(int, counts))

    def flush(self) -> None:
        """Purge the gateway's tenant on all servers, and wait until the gateway knows of it."""
        self.post("/flush_cache", {})
        wait_until(lambda: self.num_known_blocks() == 0)

    def num_unfinished(self) -> int:
        """Return how many requests run or wait on all servers."""
        return sum(each.requests.running + each.requests.waiting for each in self.stats())


def early_prompt(server: int, number: int) -> list[int]:
    """Return a prompt that was cached before the gateway was started."""
    return np.random.default_rng(10 * server + number).integers(0, 256, 1900).tolist()


def warm(server: int, address: str) -> None:
    """Cache more blocks than one part of an event snapshot describes, some of them for another tenant."""
    with Client(address, timeout_s=PATIENCE_S) as client:
        for number in range(5):
            client.prefill(early_prompt(server, number), tenant="gate" if number < 3 else "other")


@contextlib.contextmanager
def run_fleet(*settings: str) -> Iterator[Fleet]:
    """Start two servers, cache the early prompts, and then start the gateway."""
    with contextlib.ExitStack() as stack:
        servers = [ServerProcess(serve_command(MODEL, "cpu", (*SETTINGS, *settings))) for _ in range(2)]
        with ThreadPoolExecutor(2) as threads:  # the servers load their models at the same time
            addresses = list(threads.map(stack.enter_context, servers))
            list(threads.map(warm, range(2), addresses))
        gateway = GatewayProcess(addresses)
        url = stack.enter_context(gateway)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        yield Fleet(url, gateway.metrics_url, servers, addresses, stack.enter_context(client))


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with run_fleet() as shared_fleet:
        yield shared_fleet


def chat(text: str, **options: Any) -> dict[str, Any]:
    """Return the body of a request for a chat completion."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0, **options}


def test_the_second_call_reuses_all_but_the_last_token_of_the_first(fleet: Fleet) -> None:
    client = fleet.client
    first, second = (client.chat.completions.create(**chat("Tell me about trees", max_tokens=4)) for _ in range(2))
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.choices[0].finish_reason == "length"
    assert (second.usage.prompt_tokens, second.usage.completion_tokens) == (first.usage.prompt_tokens, 4)
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.prompt_tokens - 1


def test_a_streamed_chat_returns_the_same_text_and_usage(fleet: Fleet) -> None:
    client = fleet.client
    options = chat("Sing a song", max_tokens=12)
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 4
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 12)
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_a_streamed_completion_has_the_same_text(fleet: Fleet) -> None:
    client = fleet.client
    options = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**options)
    chunks = client.completions.create(**options, stream=True)
    assert "".join(each.choices[0].text for each in chunks) == whole.choices[0].text
    assert whole.usage.completion_tokens == 8


def test_chat_messages_and_responses_return_the_same_text(fleet: Fleet) -> None:
    """The same prompt is sent to OpenAI's APIs for chats and responses, and to Anthropic's API for messages."""
    messages = [{"role": "user", "content": "Hello there"}]
    options = {"model": MODEL, "temperature": 0}
    choices = fleet.post("/v1/chat/completions", {**options, "messages": messages, "max_tokens": 6})["choices"]
    message = fleet.post("/v1/messages", {**options, "messages": messages, "max_tokens": 6})
    response = fleet.post("/v1/responses", {**options, "input": "Hello there", "max_output_tokens": 6})
    assert message["content"] == [{"type": "text", "text": choices[0]["message"]["content"]}]
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 6)
    assert response["output"][0]["content"][0]["text"] == choices[0]["message"]["content"]


def test_the_chosen_token_is_the_first_of_its_top_log_probabilities(fleet: Fleet) -> None:
    answer = fleet.client.chat.completions.create(**chat("Count to five", max_tokens=5, logprobs=True, top_logprobs=3))
    rows = answer.choices[0].logprobs.content
    assert len(rows) == 5
    for row in rows:
        top_logprobs = [top.logprob for top in row.top_logprobs]
        assert top_logprobs == sorted(top_logprobs, reverse=True)
        assert (row.top_logprobs[0].token, row.top_logprobs[0].logprob) == (row.token, row.logprob)
        assert len(top_logprobs) == 3


def test_two_completions_with_a_seed_are_reproducible(fleet: Fleet) -> None:
    client = fleet.client
    options = chat("Draw", max_tokens=12, n=2, seed=-5) | {"temperature": 1.0}
    first, second = (client.chat.completions.create(**options) for _ in range(2))
    texts = [[choice.message.content for choice in answer.choices] for answer in (first, second)]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    assert first.usage.completion_tokens == 24


def test_tokens_equal_those_of_a_direct_call(fleet: Fleet) -> None:
    ids = [(7 * index) % 300 for index in range(90)]
    body = {"model": MODEL, "input_ids": ids, "sampling_params": {"max_new_tokens": 24, "temperature": 0}}
    from_gateway = fleet.post("/generate", body)[0]
    with Client(fleet.addresses[0], timeout_s=PATIENCE_S) as client:
        direct = list(client.generate(ids, max_new_tokens=24))
    assert from_gateway["output_ids"] == [token_id for chunk in direct for token_id in chunk.token_ids]
    usage = from_gateway["meta_info"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (90, 24)


@pytest.mark.parametrize("seed", [11, -7])
def test_sampled_text_equals_that_of_a_direct_call_with_the_same_seed(fleet: Fleet, seed: int) -> None:
    sampling = {"temperature": 0.9, "top_p": 0.8, "top_k": 50, "min_p": 0.01}
    prompt = {"model": MODEL, "prompt": "The quick brown fox"}
    from_gateway = fleet.post("/v1/completions", {**prompt, **sampling, "max_tokens": 24, "seed": seed})
    ids = fleet.post("/v1/tokenize", prompt)["tokens"]
    with Client(fleet.addresses[0], timeout_s=PATIENCE_S) as client:
        direct = list(client.generate(ids, max_new_tokens=24, seed=seed % 2**64, **sampling))
    tokens = [token_id for chunk in direct for token_id in chunk.token_ids]
    text = fleet.post("/v1/detokenize", {"model": MODEL, "tokens": tokens})["text"]
    assert from_gateway["choices"][0]["text"].rstrip(INCOMPLETE_CHARACTER) == text.rstrip(INCOMPLETE_CHARACTER)
    assert from_gateway["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_stop_string_ends_the_text_and_the_generation(fleet: Fleet, is_streamed: bool) -> None:
    client = fleet.client
    options = {"model": MODEL, "prompt": "The end of it", "temperature": 0, "extra_body": {"ignore_eos": True}}
    text = client.completions.create(**options, max_tokens=40).choices[0].text
    substrings = (text[start : start + 3] for start in range(10, len(text)))
    stop = next(each for each in substrings if each.isascii())
    before = sum(each.tokens.generated for each in fleet.stats())
    answer = client.completions.create(**options, max_tokens=4000, stop=[stop], stream=is_streamed)
    choices = [each.choices[0] for each in answer if each.choices] if is_streamed else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"
    wait_until(lambda: fleet.num_unfinished() == 0)
    assert sum(each.tokens.generated for each in fleet.stats()) - before <= 40


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the option of a chat completion that demands a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_output_follows_the_schema_of_openais_client(fleet: Fleet, is_streamed: bool) -> None:
    pytest.importorskip("llguidance")
    properties = {"id": {"type": "integer", "maximum": 99}, "is": {"type": "boolean"}, "of": {"enum": ["a", "b"]}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    options = chat("An object", temperature=1.0, seed=3, max_tokens=400, response_format=response_format(schema))
    answer = fleet.client.chat.completions.create(**options, stream=is_streamed)
    choices = [each.choices[0] for each in answer if each.choices] if is_streamed else [answer.choices[0]]
    texts = [choice.delta.content or "" if is_streamed else choice.message.content for choice in choices]
    value = json.loads("".join(texts))
    assert list(value) == ["id", "is", "of"]
    assert (type(value["id"]), type(value["is"])) == (int, bool)
    assert value["of"] in ("a", "b")
    assert choices[-1].finish_reason == "stop"


def test_in_json_mode_the_output_is_an_object(fleet: Fleet) -> None:
    pytest.importorskip("llguidance")
    options = chat("An object", temperature=1.0, seed=4, max_tokens=400, response_format={"type": "json_object"})
    choice = fleet.client.chat.completions.create(**options).choices[0]
    assert choice.message.content.lstrip().startswith("{")
    if choice.finish_reason == "stop":  # and not at the maximum number of tokens, in the middle of the object
        assert isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"response_format": response_format({"uniqueItems": True})}, "json_schema"),
        ({"max_tokens": 10**6}, "max_new_tokens"),
    ],
)
def test_a_refusal_names_the_field(fleet: Fleet, options: dict[str, Any], field: str) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        fleet.client.chat.completions.create(**chat("No", **options))


def num_cached_of_call(fleet: Fleet, ids: list[int]) -> int:
    """Generate one token through the gateway, and return how many tokens of the prompt were cached."""
    body = {"model": MODEL, "input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    return int(fleet.post("/generate", body)[0]["meta_info"]["cached_tokens"])


def test_the_gateway_learns_what_was_cached_before_it_started_and_forgets_it_after_a_flush(fleet: Fleet) -> None:
    early_prompts = [early_prompt(server, number) for server in range(2) for number in range(3)]
    assert [num_cached_of_call(fleet, prompt) for prompt in early_prompts] == [1899] * 6
    fleet.flush()
    assert num_cached_of_call(fleet, early_prompt(0, 0)) == 0
    with Client(fleet.addresses[0], timeout_s=PATIENCE_S) as client:
        assert client.probe(early_prompt(0, 4), tenant="other").cached_tokens == 1899, (
            "the cache of other tenants is not flushed"
        )


def test_the_gateway_learns_what_servers_cache_for_other_clients(fleet: Fleet) -> None:
    fleet.flush()
    prompts = np.random.default_rng(99).integers(0, 256, (6, 320)).tolist()
    for number, prompt in enumerate(prompts):
        with Client(fleet.addresses[number % 2], timeout_s=PATIENCE_S) as client:
            client.prefill(prompt, tenant="gate")
    wait_until(lambda: fleet.num_known_blocks() == 6 * 20)
    assert [num_cached_of_call(fleet, prompt) for prompt in prompts] == [319] * 6


def test_the_cache_of_other_tenants_is_neither_announced_nor_reused(fleet: Fleet) -> None:
    assert [num_cached_of_call(fleet, early_prompt(server, 4)) for server in range(2)] == [0, 0]


def disconnect_during_request(fleet: Fleet, is_streamed: bool) -> bool:
    """Make a request, and disconnect while it runs. Return whether the request was aborted."""
    before = sum(each.requests.cancelled for each in fleet.stats())
    host, port = fleet.url.removeprefix("http://").split(":")
    body = json.dumps(chat("For ever", max_tokens=600, stream=is_streamed)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: fleet.num_unfinished() == 1)
        if is_streamed:
            assert connection.recv(1) == b"H", "the response begins with HTTP/1.1"
    wait_until(lambda: fleet.num_unfinished() == 0)
    return sum(each.requests.cancelled for each in fleet.stats()) == before + 1


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
def test_a_client_that_disconnects_aborts_its_request(fleet: Fleet, is_streamed: bool) -> None:
    """One of four attempts suffices: on a busy machine, SMG 1.13.0 may send Abort only after the stream has ended."""
    assert any(disconnect_during_request(fleet, is_streamed) for _ in range(4))


def kill_server_during_requests(fleet: Fleet, num_requests: int) -> list[str]:
    """Send requests, four at once; kill the busier server after a quarter of them. Return the outcome of each."""
    ended_requests: list[int] = []
    victims: list[ServerProcess] = []
    num_finished_before = [each.requests.finished for each in fleet.stats()]

    def send(number: int) -> str:
        try:
            text = f"{chr(ord('A') + number % 10) * 40} begins this conversation. Question {number}"
            answer = fleet.post("/v1/chat/completions", chat(text, max_tokens=4))
            outcome = "answered" if answer["usage"]["completion_tokens"] == 4 else str(answer)
        except urllib.error.HTTPError as error:
            outcome = f"{error.code} {error.read()!r}"
        ended_requests.append(number)
        if len(ended_requests) == num_requests // 4:
            num_finished = [
                stats.requests.finished - before
                for stats, before in zip(fleet.stats(), num_finished_before, strict=True)
            ]
            victims.append(fleet.servers[num_finished.index(max(num_finished))])
            os.kill(victims[0].pid or 0, signal.SIGKILL)
        return outcome

    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(send, range(num_requests)))
    (victim,) = victims
    assert not victim.is_running
    return outcomes


def test_no_client_sees_an_error_when_a_server_is_killed(fleet: Fleet) -> None:
    assert set(kill_server_during_requests(fleet, 200)) == {"answered"}


@pytest.mark.slow
def test_no_client_sees_an_error_when_a_server_is_killed_during_480_requests() -> None:
    for _ in range(2):
        with run_fleet() as fleet:
            assert kill_server_during_requests(fleet, 480) == ["answered"] * 480


def stream_long_completion(fleet: Fleet, number: int) -> tuple[str, int]:
    """Stream a long completion; return its finish reason and its number of tokens."""
    options = chat(f"{number}" * 40, max_tokens=1000, extra_body={"ignore_eos": True})
    chunks = list(fleet.client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    reason = next(chunk.choices[0].finish_reason for chunk in reversed(chunks) if chunk.choices)
    return reason, chunks[-1].usage.completion_tokens


@pytest.mark.slow
def test_no_client_sees_an_error_when_a_server_drains_and_streams_finish() -> None:
    with run_fleet("server.drain_timeout_s=120") as fleet, ThreadPoolExecutor(12) as threads:
        streams = [threads.submit(stream_long_completion, fleet, number) for number in range(6)]
        wait_until(lambda: fleet.num_unfinished() == 6)
        texts = [f"{chr(ord('A') + number % 10) * 40} is question {number}" for number in range(40)]
        short_calls = [
            threads.submit(fleet.post, "/v1/chat/completions", chat(text, max_tokens=4, ignore_eos=True))
            for text in texts
        ]
        wait_until(lambda: sum(call.done() for call in short_calls) >= 10)
        num_running = [each.requests.running for each in fleet.stats()]
        victim = fleet.servers[num_running.index(max(num_running))]
        assert max(num_running) >= 3, "some of the six streams run on the server that is drained"
        os.kill(victim.pid or 0, signal.SIGTERM)
        assert {call.result()["usage"]["completion_tokens"] for call in short_calls} == {4}
        assert [stream.result() for stream in streams] == [("length", 1000)] * 6
        wait_until(lambda: not victim.is_running)
        assert victim.stop() == 0


def warm_servers(fleet: Fleet, seed: int) -> list[list[int]]:
    """Send twelve prompts of 20 event blocks to the servers in turn, without the gateway. Return the prompts."""
    prompts = np.random.default_rng(seed).integers(0, 256, (12, 320)).tolist()
    for number, prompt in enumerate(prompts):
        with Client(fleet.addresses[number % 2], timeout_s=PATIENCE_S) as client:
            client.prefill(prompt, tenant="gate")
    return prompts


@pytest.mark.slow
def test_requests_reach_their_prefix_after_a_restart_of_a_server_and_of_the_gateway() -> None:
    with run_fleet() as fleet, contextlib.ExitStack() as stack:
        fleet.flush()
        prompts_before_restart = warm_servers(fleet, 1)
        wait_until(lambda: fleet.num_known_blocks() == 12 * 20)
        os.kill(fleet.servers[1].pid or 0, signal.SIGKILL)
        wait_until(lambda: not fleet.servers[1].is_running)
        command = serve_command(MODEL, "cpu", SETTINGS)
        command[command.index("--port") + 1] = fleet.addresses[1].rpartition(":")[2]
        fleet.servers[1] = ServerProcess(command)
        assert stack.enter_context(fleet.servers[1]) == fleet.addresses[1]
        wait_until(lambda: num_healthy_servers(fleet.url) == 2)
        wait_until(lambda: fleet.num_known_blocks() == 6 * 20)  # the restarted server has cached nothing
        prompts_after_restart = warm_servers(fleet, 2)
        wait_until(lambda: fleet.num_known_blocks() == 18 * 20)
        assert [num_cached_of_call(fleet, prompt) for prompt in prompts_after_restart] == [319] * 12
        second_gateway = GatewayProcess(fleet.addresses)
        fleet.url = stack.enter_context(second_gateway)
        fleet.metrics_url = second_gateway.metrics_url
        wait_until(lambda: fleet.num_known_blocks() >= 18 * 20)
        cached_prompts = [*prompts_after_restart, *prompts_before_restart[::2]]  # the first server was not restarted
        assert [num_cached_of_call(fleet, prompt) for prompt in cached_prompts] == [319] * 18
