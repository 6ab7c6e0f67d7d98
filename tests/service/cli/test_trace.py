"""`radixkv trace`: the trace has the hit rates of the texts, and contains no text."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.model.tiny_files import write_tiny_files
from radixkv.planning.simulate import simulate
from radixkv.planning.trace import load_trace
from radixkv.service.cli.main import main
from radixkv.service.text.tokenizer import Tokenizer

SYSTEM = {"role": "system", "content": "You are a helpful assistant who answers every question in one line."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CHATS = [
    [SYSTEM, user("What is a radix tree?"), answer("A tree of prefixes."), user("And a trie?"), answer("The same.")],
    [SYSTEM, user("Who wrote this?"), answer("I did.")],
    [SYSTEM, user("What is a radix tree?"), answer("A tree of prefixes.")],
]
# The prompt of each answer in each chat.
PROMPTS = [chat[:end] for chat in CHATS for end in range(2, len(chat), 2)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_tiny_files(folder)
    return folder


def convert(texts: Path, tokenizer: Path, output: Path, *options: str) -> int:
    return main(["trace", str(texts), "--tokenizer", str(tokenizer), "--output", str(output), *options])


def count_hits(prompts: list[list[int]], block_size: int) -> int:
    """Count the tokens that prompts reuse: the longest prefix of whole blocks that an earlier prompt also has.

    A whole prompt is reused as well if an earlier prompt is equal or starts with it in whole blocks. Its last token is
    always computed.
    """
    earlier_prefixes: set[tuple[int, ...]] = set()
    num_hits = 0
    for prompt in prompts:
        ends = [*range(block_size, len(prompt), block_size), len(prompt)]
        longest = max((end for end in ends if tuple(prompt[:end]) in earlier_prefixes), default=0)
        num_hits += min(longest, len(prompt) - 1)
        earlier_prefixes |= {tuple(prompt[:end]) for end in ends}
    return num_hits


def sharegpt(chat: list[dict[str, str]]) -> dict[str, Any]:
    sharegpt_roles = {"system": "system", "user": "human", "assistant": "gpt"}
    return {
        "id": "x",
        "conversations": [{"from": sharegpt_roles[each["role"]], "value": each["content"]} for each in chat],
    }


FILES = {
    "ShareGPT": json.dumps([sharegpt(chat) for chat in CHATS], indent=2),
    "LMSYS": "".join(json.dumps({"conversation_id": "x", "conversation": chat}) + "\n" for chat in CHATS),
    "OpenAI batch": "".join(
        json.dumps({"custom_id": "x", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": prompt}})
        + "\n"
        for prompt in PROMPTS
    ),
}


@pytest.mark.parametrize("text_format", FILES)
@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_hit_rates_are_those_of_the_tokens(
    tmp_path: Path, capsys, tokenizer: Path, text_format: str, name: str
) -> None:
    texts, output = tmp_path / "texts", tmp_path / name
    texts.write_text(FILES[text_format])
    assert convert(texts, tokenizer, output) == 0
    assert capsys.readouterr().err == f"4 requests in {output}\n"
    requests = load_trace(output)
    encode = Tokenizer.load(tokenizer).encode_chat
    prompts = [encode(prompt) for prompt in PROMPTS]
    assert [each.input_length for each in requests] == [len(prompt) for prompt in prompts]
    assert {each.tokens_per_id for each in requests} == {16}
    result = simulate(requests, policy="lru", capacity_tokens=100_000, block_size=16)
    assert result.cached_tokens == count_hits(prompts, 16) > 0
    data = gzip.decompress(output.read_bytes()) if name.endswith(".gz") else output.read_bytes()
    assert [set(json.loads(line)) for line in data.splitlines()] == [{"input_length", "output_length", "hash_ids"}] * 4
    ids = [each for line in data.splitlines() for each in json.loads(line)["hash_ids"]]
    assert list(dict.fromkeys(ids)) == list(range(len(set(ids))))  # in the order of first appearance


def test_answers_are_counted_and_times_are_kept(tmp_path: Path, tokenizer: Path) -> None:
    texts, output = tmp_path / "texts", tmp_path / "trace"
    rows = [
        {"conversation": [user("Who?"), answer("I did.")], "tstamp": time} for time in (1_680_000_005.5, 1_680_000_007)
    ]
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert convert(texts, tokenizer, output) == 0
    num_tokens = len(Tokenizer.load(tokenizer).encode("I did."))
    assert [(each.timestamp_ms, each.output_length) for each in load_trace(output)] == [
        (0, num_tokens),
        (1500, num_tokens),
    ]


def test_chats_that_the_template_refuses_are_left_out_and_counted(tmp_path: Path, capsys, tokenizer: Path) -> None:
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    refusal = "{% if messages[0]['role'] == 'tool' %}{{ raise_exception('no tool first') }}{% endif %}"
    settings["chat_template"] = refusal + "{{ messages[0]['content'] }}"
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    texts, output = tmp_path / "texts", tmp_path / "trace"
    refused_chat = json.dumps({"messages": [{"role": "tool", "content": "x"}]})
    texts.write_text(f"{json.dumps({'messages': [user('Who?')]})}\n{refused_chat}\n{refused_chat}\n")
    assert convert(texts, tokenizer, output) == 0
    err = capsys.readouterr().err
    assert err.startswith(f"1 requests in {output}; 2 left out, the first one: {texts}:2: ")
    texts.write_text(refused_chat)
    assert convert(texts, tokenizer, output) == 2
    assert "texts: the file has no prompt that can be encoded" in capsys.readouterr().err


def test_without_a_chat_template_a_chat_is_encoded_in_a_plain_form(tmp_path: Path, tokenizer: Path) -> None:
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    texts, output = tmp_path / "texts", tmp_path / "trace"
    texts.write_text(json.dumps({"messages": [user("Who?")]}))
    assert convert(texts, tokenizer, output) == 0
    assert load_trace(output)[0].input_length == len(Tokenizer.load(tokenizer).encode("user: Who?\n"))


def test_the_number_of_prompts_and_of_tokens_per_id_are_options(tmp_path: Path, tokenizer: Path) -> None:
    texts, output = tmp_path / "texts", tmp_path / "trace"
    texts.write_text(FILES["LMSYS"] + "not JSON")
    assert convert(texts, tokenizer, output, "--limit", "3", "--tokens-per-id", "4") == 0
    assert [each.tokens_per_id for each in load_trace(output)] == [4, 4, 4]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("{}", [], "texts:1: expected text in one of the fields"),
        ("", [], "texts: the file has no prompt"),
        ("a,b\n", [], "A table of lengths does not say"),
        ('{"prompt": "x"}', ["--tokens-per-id", "65537"], "--tokens-per-id: expected 1 to 65536, got 65537"),
        ('{"prompt": "x"}', ["--tokenizer", "/nowhere"], "--tokenizer: "),
        ('{"prompt": "x"}', ["--output", "/nowhere/trace"], "--output: expected a file that can be written, got"),
    ],
)
def test_a_file_that_cannot_be_converted_is_refused(
    tmp_path: Path, capsys, tokenizer: Path, text: str, options: list[str], message: str
) -> None:
    texts = tmp_path / "texts"
    texts.write_text(text)
    assert convert(texts, tokenizer, tmp_path / "trace", *options) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
