"""Text input and output of a whole service: the embedded model's tokenizer, chats, stop strings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from radixkv.service.cli.main import main
from radixkv.service.client import Client, Tokenizer
from radixkv.v1.prefill_pb2 import LENGTH, STOP, GenerateResponse
from tests.patience import PATIENCE_S, wait_until
from tests.whole.forked_server import serving

PROMPT = "You are a helpful assistant. Hello"
BROKEN = "\ufffd"


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


def answers(
    client: Client, prompt: list[int], n: int = 1, **options: object
) -> list[tuple[list[int], GenerateResponse]]:
    """Return the tokens and the last message of each completion, sampled with a seed."""
    chunks = list(client.generate(prompt, temperature=1.0, seed=3, n=n, **options))
    by_index = [[each for each in chunks if each.index == index] for index in range(n)]
    return [([token_id for each in own for token_id in each.token_ids], own[-1]) for own in by_index]


def a_string_in(tokenizer: Tokenizer, token_ids: list[int], after: int) -> tuple[str, int]:
    """Return characters that occur once, after this number of tokens, and the number of tokens up to their end."""
    for count in range(after, len(token_ids)):
        stop = tokenizer.decode(token_ids[:count])[-3:]
        first = next(n for n in range(count + 1) if stop in tokenizer.decode(token_ids[:n]))
        if stop.isprintable() and BROKEN not in stop and first == count:
            return stop, count
    raise AssertionError("no such text")


def test_a_stop_string_ends_the_text(client: Client, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT)
    ((whole, _),) = answers(client, prompt, max_new_tokens=120)
    stop, count = a_string_in(tokenizer, whole, after=20)
    before = client.stats().requests
    ((token_ids, last),) = answers(client, prompt, max_new_tokens=5000, stop=[stop, "never in there"])
    assert token_ids == whole[:count]
    assert (last.finish_reason, last.matched_stop, last.usage.generated_tokens) == (STOP, stop, count)
    assert last.HasField("timing")
    after = client.stats().requests
    assert (after.finished - before.finished, after.cancelled - before.cancelled) == (1, 0)
    assert client.stats().blocks.leased == 0
    again = client.prefill([*prompt, *token_ids])
    assert again.usage.computed_tokens == 1, "the answer is cached to its last token"


def test_each_of_several_completions_stops_independently(client: Client, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT)
    whole = [token_ids for token_ids, _ in answers(client, prompt, n=3, max_new_tokens=120)]
    stop, count = a_string_in(tokenizer, whole[1], after=20)
    cut = answers(client, prompt, n=3, max_new_tokens=120, stop=[stop])
    assert (cut[1][0], cut[1][1].matched_stop) == (whole[1][:count], stop)
    for index in (0, 2):
        if stop not in tokenizer.decode(whole[index]):
            assert (cut[index][0], cut[index][1].finish_reason) == (whole[index], LENGTH)


def test_a_stop_string_ends_preempted_completions(client: Client, tokenizer: Tokenizer) -> None:
    prompts = [tokenizer.encode(f"{number} {PROMPT}") for number in range(4)]
    whole = [answers(client, prompt, max_new_tokens=120)[0][0] for prompt in prompts]
    stops = [a_string_in(tokenizer, token_ids, after=70) for token_ids in whole]
    crowded = ("--set", "cache.capacity_tokens=192", "--set", "cache.block_size=16")
    with (
        serving(*crowded) as (_, address),
        Client(address, timeout_s=PATIENCE_S) as small,
        ThreadPoolExecutor(4) as threads,
    ):
        ask = [
            threads.submit(answers, small, prompt, max_new_tokens=130, stop=[stop])
            for prompt, (stop, _) in zip(prompts, stops, strict=True)
        ]
        chunks = [each.result()[0] for each in ask]
        assert [token_ids for token_ids, _ in chunks] == [
            token_ids[:count] for token_ids, (_, count) in zip(whole, stops, strict=True)
        ]
        assert {last.finish_reason for _, last in chunks} == {STOP}
        assert small.stats().requests.pauses > 0
        wait_until(lambda: small.stats().blocks.leased == 0)


def test_the_command_reads_and_prints_text(
    capsys: pytest.CaptureFixture[str], address: str, tokenizer: Tokenizer
) -> None:
    def run(*arguments: str) -> str:
        assert main([*arguments, "--address", address]) == 0
        return capsys.readouterr().out

    assert "tokens" in run("prefill", "--text", PROMPT)
    plain = json.loads(run("generate", "--text", PROMPT, "--max-new-tokens", "20", "--json"))
    assert plain["usage"]["prompt_tokens"] == len(tokenizer.encode(PROMPT))
    assert plain["text"] == tokenizer.decode(plain["token_ids"])
    shown = run("generate", "--text", PROMPT, "--max-new-tokens", "20")
    assert shown.startswith(plain["text"] + "\n")
    chat = json.loads(run("generate", "--text", "Hello", "--chat", "--system", "You are kind.", "--json"))
    messages = [{"role": "system", "content": "You are kind."}, {"role": "user", "content": "Hello"}]
    assert chat["usage"]["prompt_tokens"] == len(tokenizer.encode_chat(messages))
    as_bytes = json.loads(run("prefill", "--text", PROMPT, "--bytes", "--json"))
    assert as_bytes["usage"]["prompt_tokens"] == len(PROMPT)


def test_a_text_and_its_token_ids_have_the_same_result(client: Client, tokenizer: Tokenizer) -> None:
    chunks = list(client.generate(PROMPT, max_new_tokens=40, temperature=1.0, seed=5, tenant="text"))
    of_ids = list(client.generate(tokenizer.encode(PROMPT), max_new_tokens=40, temperature=1.0, seed=5, tenant="text"))
    token_ids, last = [token_id for each in of_ids for token_id in each.token_ids], of_ids[-1]
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == token_ids
    assert "".join(chunk.text for chunk in chunks) == tokenizer.decode(token_ids)
    assert last.usage.cached_tokens == last.usage.prompt_tokens - 1, "the text was cached under the same tokens"


def test_a_chat_reuses_the_earlier_turns(client: Client) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    first = client.chat(messages, max_new_tokens=20, ignore_eos=True, tenant="chat")
    messages.append({"role": "assistant", "content": first.read()})
    messages.append({"role": "user", "content": "And then?"})
    second = client.chat(messages, max_new_tokens=1, tenant="chat")
    second.read()
    assert second.response.usage.cached_tokens >= first.response.usage.prompt_tokens
    assert second.response.usage.prompt_tokens > second.response.usage.cached_tokens
