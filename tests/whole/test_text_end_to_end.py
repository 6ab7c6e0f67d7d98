"""Text input and output of a server with the embedded model: its tokenizer, chats and stop strings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from radixkv.service.cli.main import main
from radixkv.service.client import Client, Tokenizer
from radixkv.v1.prefill_pb2 import LENGTH, STOP
from tests.patience import PATIENCE_S, wait_until
from tests.whole.completions import complete
from tests.whole.forked_server import serving

PROMPT = "You are a helpful assistant. Hello"
REPLACEMENT_CHARACTER = "\ufffd"  # the text of bytes whose character is not complete


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as (_, address):
        yield address


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Client]:
    with Client(address, timeout_s=PATIENCE_S) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(client: Client) -> Tokenizer:
    return client.tokenizer()


def find_stop_string(tokenizer: Tokenizer, token_ids: list[int], min_tokens: int) -> tuple[str, int]:
    """Return three characters that first occur after `min_tokens` or more, and the number of tokens up to their end."""
    for num_tokens in range(min_tokens, len(token_ids)):
        stop = tokenizer.decode(token_ids[:num_tokens])[-3:]
        first_end = next(n for n in range(num_tokens + 1) if stop in tokenizer.decode(token_ids[:n]))
        if stop.isprintable() and REPLACEMENT_CHARACTER not in stop and first_end == num_tokens:
            return stop, num_tokens
    raise AssertionError("expected characters that can be a stop string, got none")


def test_a_stop_string_ends_the_text(client: Client, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT)
    ((whole, _),) = complete(client, prompt, max_new_tokens=120)
    stop, count = find_stop_string(tokenizer, whole, min_tokens=20)
    before = client.stats().requests
    ((token_ids, last),) = complete(client, prompt, max_new_tokens=5000, stop=[stop, "never in there"])
    assert token_ids == whole[:count]
    assert (last.finish_reason, last.matched_stop, last.usage.generated_tokens) == (STOP, stop, count)
    assert last.HasField("timing")
    after = client.stats().requests
    assert (after.finished - before.finished, after.cancelled - before.cancelled) == (1, 0)
    assert client.stats().blocks.leased == 0
    next_turn = client.prefill([*prompt, *token_ids])
    assert next_turn.usage.computed_tokens == 1, "the answer is cached to its last token"


def test_each_of_several_completions_stops_independently(client: Client, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT)
    whole = [token_ids for token_ids, _ in complete(client, prompt, n=3, max_new_tokens=120)]
    stop, count = find_stop_string(tokenizer, whole[1], min_tokens=20)
    cut = complete(client, prompt, n=3, max_new_tokens=120, stop=[stop])
    assert (cut[1][0], cut[1][1].matched_stop) == (whole[1][:count], stop)
    for index in (0, 2):
        if stop not in tokenizer.decode(whole[index]):
            assert (cut[index][0], cut[index][1].finish_reason) == (whole[index], LENGTH)


def test_a_stop_string_ends_preempted_completions(client: Client, tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode(f"{number} {PROMPT}") for number in range(4)]
    whole = [complete(client, prompt, max_new_tokens=120)[0][0] for prompt in prompts]
    stops = [find_stop_string(tokenizer, token_ids, min_tokens=70) for token_ids in whole]
    small_pool = ("--set", "cache.capacity_tokens=192", "--set", "cache.block_size=16")
    with (
        serving(*small_pool) as (_, address),
        Client(address, timeout_s=PATIENCE_S) as client_of_small_pool,
        ThreadPoolExecutor(4) as threads,
    ):
        calls = [
            threads.submit(complete, client_of_small_pool, prompt, max_new_tokens=130, stop=[stop])
            for prompt, (stop, _) in zip(prompts, stops, strict=True)
        ]
        completions = [call.result()[0] for call in calls]
        assert [token_ids for token_ids, _ in completions] == [
            token_ids[:count] for token_ids, (_, count) in zip(whole, stops, strict=True)
        ]
        assert {last.finish_reason for _, last in completions} == {STOP}
        assert client_of_small_pool.stats().requests.pauses > 0, "requests were preempted"
        wait_until(lambda: client_of_small_pool.stats().blocks.leased == 0)


def test_the_command_reads_and_prints_text(
    capsys: pytest.CaptureFixture[str], address: str, tokenizer: Tokenizer
) -> None:
    def run(*arguments: str) -> str:
        assert main([*arguments, "--address", address]) == 0
        return capsys.readouterr().out

    assert "tokens" in run("prefill", "--text", PROMPT)
    completion = json.loads(run("generate", "--text", PROMPT, "--max-new-tokens", "20", "--json"))
    assert completion["usage"]["prompt_tokens"] == len(tokenizer.encode(PROMPT))
    assert completion["text"] == tokenizer.decode(completion["token_ids"])
    printed = run("generate", "--text", PROMPT, "--max-new-tokens", "20")
    assert printed.startswith(completion["text"] + "\n")
    chat = json.loads(run("generate", "--text", "Hello", "--chat", "--system", "You are kind.", "--json"))
    messages = [{"role": "system", "content": "You are kind."}, {"role": "user", "content": "Hello"}]
    assert chat["usage"]["prompt_tokens"] == len(tokenizer.encode_chat(messages))
    as_bytes = json.loads(run("prefill", "--text", PROMPT, "--bytes", "--json"))
    assert as_bytes["usage"]["prompt_tokens"] == len(PROMPT)


def test_a_text_and_its_token_ids_have_the_same_result(client: Client, tokenizer: Tokenizer) -> None:
    options = {"max_new_tokens": 40, "temperature": 1.0, "seed": 5, "tenant": "text"}
    chunks_of_text = list(client.generate(PROMPT, **options))
    chunks_of_ids = list(client.generate(tokenizer.encode(PROMPT), **options))
    token_ids = [token_id for chunk in chunks_of_ids for token_id in chunk.token_ids]
    assert [token_id for chunk in chunks_of_text for token_id in chunk.token_ids] == token_ids
    assert "".join(chunk.text for chunk in chunks_of_text) == tokenizer.decode(token_ids)
    usage = chunks_of_ids[-1].usage
    assert usage.cached_tokens == usage.prompt_tokens - 1, "the text was cached under the same tokens"


def test_a_chat_reuses_the_earlier_turns(client: Client) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    first = client.chat(messages, max_new_tokens=20, ignore_eos=True, tenant="chat")
    messages.append({"role": "assistant", "content": first.read()})
    messages.append({"role": "user", "content": "And then?"})
    second = client.chat(messages, max_new_tokens=1, tenant="chat")
    second.read()
    assert second.response.usage.cached_tokens >= first.response.usage.prompt_tokens
    assert second.response.usage.prompt_tokens > second.response.usage.cached_tokens
