import asyncio

import grpc
import numpy as np
import pytest

from radixkv.api.params import PrefillParams
from radixkv.api.sampling import Sampling
from radixkv.errors import InvalidRequest
from radixkv.service.client import AsyncClient
from radixkv.service.server import model_tokenizer as module
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.servicers.stop_strings import MAX_STOP_CHARS, MAX_STOPS, require_stops, stop_strings
from radixkv.v1.prefill_pb2 import LENGTH, STOP
from tests.patience import PATIENCE_S
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serving

PROMPT = [1]
ANSWER = [1, 2, 4, 8, 16, 32, 64, 128, 0, 0]  # of the fake engine; as text it goes on with " ", "@", no text, NUL


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ([""], "stop[0]: expected 1 to 256 characters, got 0"),
        (["a", "b" * (MAX_STOP_CHARS + 1)], "stop[1]: expected 1 to 256 characters, got 257"),
        (["a"] * (MAX_STOPS + 1), "stop: expected at most 16 strings, got 17"),
    ],
)
def test_strings_that_end_nothing_and_too_many_are_refused(stops, message):
    with pytest.raises(InvalidRequest) as refused:
        require_stops(stops)
    assert str(refused.value) == message


def test_the_most_that_is_allowed_is_allowed():
    require_stops([f"{number:256}" for number in range(MAX_STOPS)])


def watching(stops, model_path="tiny", prompt=PROMPT, **sampling):
    params = PrefillParams(np.array(prompt, dtype="<u4").tobytes())
    return asyncio.run(stop_strings(ModelTokenizer(model_path), stops, params, Sampling(**sampling), 2))


def test_without_strings_no_tokenizer_is_loaded(monkeypatch):
    monkeypatch.setattr(module.Tokenizer, "load", lambda *_: pytest.fail("no request needs it"))
    assert watching([]) is None


def test_each_answer_has_a_text_of_its_own():
    strings = watching(["ab"])
    assert [strings.num_kept(index, [ord("a")]) for index in (0, 1)] == [1, 1]
    assert strings.num_kept(1, [ord("b"), ord("c")]) == 1
    assert (strings.has_ended(0), strings.has_ended(1)) == (False, True)
    assert strings.num_kept(1, [ord("d")]) == 0
    assert strings.num_kept(0, [ord("c"), ord("d")]) == 2


def test_the_end_of_the_prompt_is_no_part_of_the_answer():
    strings = watching(["ab"], prompt=[ord("a")])
    assert strings.num_kept(0, [*b"bcab"]) == 4
    assert strings.has_ended(0)


@pytest.mark.parametrize("files", [None, {}, {"tokenizer.json": "no"}])
def test_a_model_without_a_tokenizer_is_refused_by_the_name_of_the_field(tmp_path, files, caplog):
    for name, text in (files or {}).items():
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidRequest, match=r"^stop: the model has no tokenizer, which stop strings require$"):
        watching(["a"], None if files is None else str(tmp_path))
    assert "the model has no tokenizer: " in caplog.text, "the log has the cause"


def generating(model_path="tiny", engine=None, **options):
    """The answers of a server around a fake engine, or its refusal."""

    async def run():
        async with (
            serving(engine or FakeEngine(), model_path=model_path) as (_, address),
            AsyncClient(address, timeout_s=PATIENCE_S) as client,
        ):
            return [answer async for answer in client.generate(PROMPT, **options)]

    return asyncio.run(run())


def joined(answers, index=0):
    own = [answer for answer in answers if answer.index == index]
    return [token_id for answer in own for token_id in answer.token_ids], own[-1]


@pytest.mark.parametrize("is_gated", [False, True])
def test_a_string_ends_the_answer_with_the_token_that_completes_it(is_gated):
    # While gated the engine never ends a generation by itself, so it was asked to.
    answers = generating(engine=FakeEngine(is_gated=is_gated), stop=[" @", "nothing"], max_new_tokens=500, logprobs=1)
    token_ids, last = joined(answers)
    assert token_ids == ANSWER[:7]
    assert (last.finished, last.finish_reason, last.matched_stop) == (True, STOP, " @")
    assert last.usage.generated_tokens == 7
    assert sum(len(answer.logprobs) for answer in answers) == 7
    assert [answer.finished for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert answers[0].usage.prompt_tokens == 1


def test_a_string_that_the_last_token_completes_ends_it_too():
    token_ids, last = joined(generating(stop=["@"], max_new_tokens=7))
    assert (token_ids, last.finish_reason, last.matched_stop) == (ANSWER[:7], STOP, "@")


def test_a_string_that_does_not_come_changes_nothing():
    token_ids, last = joined(generating(stop=["no"], max_new_tokens=9))
    assert (token_ids, last.finish_reason, last.matched_stop) == (ANSWER[:9], LENGTH, "")


def test_a_string_does_not_count_before_the_least_number_of_tokens():
    token_ids, last = joined(generating(stop=["@", "\0\0"], min_tokens=7, max_new_tokens=500))
    assert (token_ids, last.matched_stop) == (ANSWER, "\0\0")


def test_all_answers_to_a_prompt_end_by_themselves():
    answers = generating(stop=[" @"], n=3, max_new_tokens=500)
    for index in range(3):
        token_ids, last = joined(answers, index)
        assert (token_ids, last.finish_reason, last.matched_stop) == (ANSWER[:7], STOP, " @")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": [""]}, "stop[0]: expected 1 to 256 characters, got 0"),
        ({"stop": ["a"] * 17}, "stop: expected at most 16 strings, got 17"),
        ({"stop": ["a"], "model_path": None}, "stop: the model has no tokenizer, which stop strings require"),
    ],
)
def test_stop_strings_that_cannot_be_matched_are_refused_before_the_engine_is_called(options, message):
    engine = FakeEngine()
    with pytest.raises(grpc.RpcError) as refused:
        generating(engine=engine, **options)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith(message)
    assert engine.futures == []


@pytest.mark.parametrize(
    ("stop", "message"), [("abc", "stop: expected a sequence of strings, got 'abc'"), ([5], "stop")]
)
def test_a_client_refuses_what_is_no_list_of_strings(stop, message):
    with pytest.raises(TypeError, match=message):
        generating(stop=stop)
