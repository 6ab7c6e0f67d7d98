"""Completions of the embedded model that follow a schema, a regular expression or a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

pytest.importorskip("llguidance")

from radixkv.service.cli.main import main
from radixkv.service.client import Client, Tokenizer
from radixkv.v1.prefill_pb2 import LENGTH, STOP
from tests.patience import PATIENCE_S
from tests.whole.completions import complete
from tests.whole.forked_server import serving

PROMPT = "You are a helpful assistant. Hello"
IM_END = 511  # the token with which the embedded model ends its answers

SCHEMA = {
    "x-guidance": {"whitespace_flexible": False},  # the model, trained on books, writes empty lines where it may
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 500},
        "name": {"type": "string", "maxLength": 12},
        "state": {"enum": ["open", "closed"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,5}$"}, "maxItems": 3},
        "inner": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/inner"}]},
    },
    "required": ["id", "name", "state", "tags", "inner"],
    "additionalProperties": False,
    "$defs": {
        "inner": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "is": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


def is_valid(value: Any) -> bool:
    """Return whether a value follows the schema."""
    return (
        list(value) == ["id", "name", "state", "tags", "inner"]
        and type(value["id"]) is int
        and 0 <= value["id"] <= 500
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and value["state"] in ("open", "closed")
        and len(value["tags"]) <= 3
        and all(re.fullmatch("[a-z]{2,5}", tag) for tag in value["tags"])
        and (value["inner"] is None or is_valid_inner(value["inner"]))
    )


def is_valid_inner(value: Any) -> bool:
    return (
        {"x"} <= value.keys() <= {"x", "is"}
        and type(value["x"]) in (int, float)
        and value.get("is") in (None, True, False)  # None if there is no "is"
    )


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


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_every_completion_follows_its_schema(client: Client, tokenizer: Tokenizer, temperature: float) -> None:
    prompt, finish_reasons = tokenizer.encode(PROMPT), []
    for seed in range(0, 32, 16):
        options = {"json_schema": json.dumps(SCHEMA), "temperature": temperature, "seed": seed, "max_new_tokens": 300}
        for token_ids, last in complete(client, prompt, n=16, **options):
            finish_reasons.append(last.finish_reason)
            if last.finish_reason == STOP:
                assert is_valid(json.loads(tokenizer.decode(token_ids)))
            else:
                assert len(token_ids) == 300
    assert finish_reasons.count(STOP) > 20, "of 32 completions"


def test_a_truncated_completion_is_a_prefix_of_the_whole_one(client: Client, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT)
    options = {"json_schema": json.dumps(SCHEMA), "top_p": 0.9}
    ((whole, last),) = complete(client, prompt, max_new_tokens=500, **options)
    assert last.finish_reason == STOP
    ((cut, last),) = complete(client, prompt, max_new_tokens=len(whole) - 1, **options)
    assert (cut, last.finish_reason) == (whole[:-1], LENGTH)
    ((exact, last),) = complete(client, prompt, max_new_tokens=len(whole), **options)
    assert (exact, last.finish_reason) == (whole, STOP)


def test_each_of_several_completions_equals_that_of_a_single_call(client: Client, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT + " in JSON")
    options = {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 60, "temperature": 1.5}
    together = [token_ids for token_ids, _ in complete(client, prompt, n=3, **options)]
    for index, expected in enumerate(together):
        single_call_options = {**options, "seed": 3 + index}
        ((cached, last),) = complete(client, prompt, **single_call_options)
        assert last.usage.cached_tokens == len(prompt) - 1
        ((cold, last),) = complete(client, prompt, read_cache=False, **single_call_options)
        assert last.usage.cached_tokens == 0
        assert cached == cold == expected
    assert len({tuple(each) for each in together}) == 3


def test_constrained_requests_do_not_change_the_samples_of_others(client: Client, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT)
    ((expected, _),) = complete(client, prompt, max_new_tokens=80)
    options = {"temperature": 1.0, "seed": 3, "max_new_tokens": 80}
    unconstrained = client.generate(prompt, **options)
    constrained = client.generate(prompt, json_object=True, **options)
    first_chunk = next(constrained)  # both are running now
    assert [token_id for chunk in unconstrained for token_id in chunk.token_ids] == expected
    chunks = [first_chunk, *constrained]
    assert tokenizer.decode([token_id for chunk in chunks for token_id in chunk.token_ids])[0] == "{"


def test_each_kind_of_grammar_is_followed(client: Client, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT)
    kinds = {
        "regex": ("(ab|cd){3}x?é", lambda text: re.fullmatch("(ab|cd){3}x?é", text)),
        "grammar": ('root ::= "yes" | "no" " "+ [0-9]{2}', lambda text: re.fullmatch("yes|no +[0-9]{2}", text)),
        "json_object": (True, lambda text: isinstance(json.loads(text), dict)),
    }
    for kind, (value, follows_grammar) in kinds.items():
        for token_ids, last in complete(client, prompt, n=8, max_new_tokens=200, **{kind: value}):
            assert last.finish_reason == LENGTH or follows_grammar(tokenizer.decode(token_ids))
    ((switched_off, _),) = complete(client, prompt, json_object=False)
    ((unconstrained, _),) = complete(client, prompt)
    assert switched_off == unconstrained


def test_a_special_stop_token_is_only_sampled_where_the_grammar_may_end(client: Client, tokenizer: Tokenizer) -> None:
    prompt, bias = tokenizer.encode(PROMPT), {IM_END: 100.0}
    options = {"stop_token_ids": [IM_END], "logit_bias": bias, "max_new_tokens": 40}
    ((token_ids, last),) = complete(client, prompt, regex="(ab){2,}", **options)
    assert (tokenizer.decode(token_ids), token_ids[-1], last.finish_reason) == ("abab", IM_END, STOP)
    ((token_ids, last),) = complete(client, prompt, regex="(ab){2,}", **{**options, "min_tokens": 12})
    assert len(token_ids) > 12
    assert re.fullmatch("(ab){2,}", tokenizer.decode(token_ids))
    assert (token_ids[-1], last.finish_reason) == (IM_END, STOP)


def test_stop_strings_end_a_constrained_completion(client: Client, tokenizer: Tokenizer) -> None:
    ((token_ids, last),) = complete(
        client, tokenizer.encode(PROMPT), regex="(ab)*c", stop=["bab"], logit_bias={99: -100}
    )
    assert tokenizer.decode(token_ids) == "abab"
    assert (last.finish_reason, last.matched_stop) == (STOP, "bab")


def test_the_next_turn_reuses_the_whole_completion(client: Client, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT + " once")
    ((token_ids, last),) = complete(client, prompt, regex="[a-z]{5,40}!", max_new_tokens=60)
    assert last.finish_reason == STOP
    next_turn = client.prefill([*prompt, *token_ids, 1])
    assert next_turn.usage.cached_tokens >= len(prompt) + len(token_ids) - 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"regex": "(a"}, "regex"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "json_schema"),
        ({"grammar": "root ::= nothing"}, "grammar"),
        ({"regex": "a" * 5000}, "regex"),
        (
            {"regex": "((((a{1,30}){1,30}){1,30}){1,30}){1,30}", "ignore_eos": True},
            "regex",
        ),  # too complex after some tokens
    ],
)
def test_an_invalid_grammar_is_refused_by_name(client: Client, options: dict[str, Any], field: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        complete(client, [1, 2, 3], max_new_tokens=2000, **options)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith(f"{field}: ")
    assert client.stats().requests.running == 0
    assert client.stats().blocks.leased == 0


def test_two_grammars_are_refused_by_the_client(client: Client) -> None:
    with pytest.raises(ValueError, match=r"^regex: can't be combined with json_schema$"):
        complete(client, [1], json_schema="{}", regex="a")


def test_the_command_line_accepts_a_schema(address: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA), encoding="utf-8")
    command = ["generate", "--address", address, "--text", PROMPT, "--max-new-tokens", "500", "--temperature", "1"]
    for file_or_text in (str(schema), json.dumps(SCHEMA)):
        assert main([*command, "--seed", "1", "--json-schema", file_or_text]) == 0
        out = capsys.readouterr().out
        value, _ = json.JSONDecoder().raw_decode(out)
        assert is_valid(value)
    assert main([*command, "--regex", "(ab)+c"]) == 0
    assert re.match(r"(ab)+c\n", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main([*command, "--regex", "a", "--json-object"])
    assert "not allowed with" in capsys.readouterr().err
