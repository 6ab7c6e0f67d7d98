"""Stop strings end completions over gRPC, and invalid ones are refused before the engine is called."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from radixkv.api.params import PrefillParams
from radixkv.api.sampling import Sampling
from radixkv.errors import InvalidRequest
from radixkv.service.client import AsyncClient
from radixkv.service.server import model_tokenizer as module
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.servicers.stop_strings import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    StopStrings,
    require_stops,
    stop_strings,
)
from radixkv.v1.prefill_pb2 import LENGTH, STOP, GenerateResponse
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serving

PROMPT = [1]
# The answer of the fake engine. Tokens 32, 64 and 0 are the characters " ", "@" and NUL; 128 alone is no text.
ANSWER = [1, 2, 4, 8, 16, 32, 64, 128, 0, 0]


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ([""], "stop[0]: expected 1 to 256 characters, got 0"),
        (["a", "b" * (MAX_STOP_CHARS + 1)], "stop[1]: expected 1 to 256 characters, got 257"),
        (["a"] * (MAX_STOPS + 1), "stop: expected at most 16 strings, got 17"),
    ],
)
def test_empty_long_and_too_many_stop_strings_are_refused(stops: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        require_stops(stops)
    assert str(refused.value) == message


def test_the_maximum_number_and_length_are_allowed() -> None:
    require_stops([str(number).rjust(MAX_STOP_CHARS) for number in range(MAX_STOPS)])


def make_stop_strings(
    stops: Sequence[str], model_path: str | None = "tiny", prompt: Sequence[int] = PROMPT, **sampling: Any
) -> StopStrings | None:
    params = PrefillParams(np.array(prompt, dtype="<u4").tobytes())
    return asyncio.run(stop_strings(ModelTokenizer(model_path), stops, params, Sampling(**sampling), 2))


def test_without_strings_no_tokenizer_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Tokenizer, "load", lambda *_: pytest.fail("no request needs it"))
    assert make_stop_strings([]) is None


def test_each_answer_has_a_text_of_its_own() -> None:
    strings = make_stop_strings(["ab"])
    assert [strings.add_tokens(index, [ord("a")]) for index in (0, 1)] == [1, 1]
    assert strings.add_tokens(1, [ord("b"), ord("c")]) == 1
    assert (strings.has_ended(0), strings.has_ended(1)) == (False, True)
    assert strings.add_tokens(1, [ord("d")]) == 0
    assert strings.add_tokens(0, [ord("c"), ord("d")]) == 2


def test_the_end_of_the_prompt_is_no_part_of_the_answer() -> None:
    strings = make_stop_strings(["ab"], prompt=[ord("a")])
    assert strings.add_tokens(0, [*b"bcab"]) == 4
    assert strings.has_ended(0)


@pytest.mark.parametrize(
    "files", [None, {}, {"tokenizer.json": "no"}], ids=["no directory", "no tokenizer", "a broken tokenizer"]
)
def test_a_model_without_a_tokenizer_is_refused_and_the_error_names_the_field(
    tmp_path: Path, files: dict[str, str] | None, caplog: pytest.LogCaptureFixture
) -> None:
    for name, text in (files or {}).items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidRequest, match=r"^stop: the model has no tokenizer, which stop strings require$"):
        make_stop_strings(["a"], None if files is None else str(tmp_path))
    assert "the model has no tokenizer: " in caplog.text, "the log has the cause"


def generate(
    model_path: str | None = "tiny", engine: FakeEngine | None = None, **options: Any
) -> list[GenerateResponse]:
    """Return the answers of a server around a fake engine. Raises its refusal."""

    async def run() -> list[GenerateResponse]:
        async with (
            serving(engine or FakeEngine(), model_path=model_path) as (_, address),
            AsyncClient(address, timeout_s=PATIENCE_S) as client,
        ):
            return [answer async for answer in client.generate(PROMPT, **options)]

    return asyncio.run(run())


def joined(answers: Sequence[GenerateResponse], index: int = 0) -> tuple[list[int], GenerateResponse]:
    """Return all tokens of one completion, and its last response."""
    responses = [answer for answer in answers if answer.index == index]
    return [token_id for response in responses for token_id in response.token_ids], responses[-1]


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_string_ends_the_answer_with_the_token_that_completes_it(*, is_gated: bool) -> None:
    # A gated engine ends a generation only when it is cancelled, so the answer shows that the server does so.
    answers = generate(engine=FakeEngine(is_gated=is_gated), stop=[" @", "nothing"], max_new_tokens=500, logprobs=1)
    token_ids, last = joined(answers)
    assert token_ids == ANSWER[:7]
    assert (last.finished, last.finish_reason, last.matched_stop) == (True, STOP, " @")
    assert last.usage.generated_tokens == 7
    assert sum(len(answer.logprobs) for answer in answers) == 7
    assert [answer.finished for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert answers[0].usage.prompt_tokens == 1


def test_a_stop_string_that_the_last_token_completes_is_the_finish_reason() -> None:
    token_ids, last = joined(generate(stop=["@"], max_new_tokens=7))
    assert (token_ids, last.finish_reason, last.matched_stop) == (ANSWER[:7], STOP, "@")


def test_a_string_that_does_not_occur_changes_nothing() -> None:
    token_ids, last = joined(generate(stop=["no"], max_new_tokens=9))
    assert (token_ids, last.finish_reason, last.matched_stop) == (ANSWER[:9], LENGTH, "")


def test_a_string_within_min_tokens_is_ignored() -> None:
    token_ids, last = joined(generate(stop=["@", "\0\0"], min_tokens=7, max_new_tokens=500))
    assert (token_ids, last.matched_stop) == (ANSWER, "\0\0")


def test_each_of_several_answers_ends_at_its_own_stop_string() -> None:
    answers = generate(stop=[" @"], n=3, max_new_tokens=500)
    for index in range(3):
        token_ids, last = joined(answers, index)
        assert (token_ids, last.finish_reason, last.matched_stop) == (ANSWER[:7], STOP, " @")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": [""]}, "stop[0]: expected 1 to 256 characters, got 0"),
        ({"stop": ["a"], "model_path": None}, "stop: the model has no tokenizer, which stop strings require"),
    ],
)
def test_stop_strings_that_cannot_be_matched_are_refused_before_the_engine_is_called(
    options: dict[str, Any], message: str
) -> None:
    engine = FakeEngine()
    with pytest.raises(grpc.RpcError) as refused:
        generate(engine=engine, **options)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith(message)
    assert engine.futures == []


@pytest.mark.parametrize(
    ("stop", "message"), [("abc", "stop: expected a sequence of strings, got 'abc'"), ([5], "stop")]
)
def test_a_client_refuses_values_other_than_lists_of_strings(stop: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        generate(stop=stop)
