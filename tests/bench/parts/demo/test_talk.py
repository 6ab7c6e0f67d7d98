from __future__ import annotations

import pytest

from bench.parts.demo.talk import PromptTokens, Talk, num_finished, say
from tests.service.fake_engine import FakeEngine
from tests.service.serving import serve_and_call


def test_a_talk_counts_answers_errors_and_cached_tokens() -> None:
    talk = Talk([PromptTokens(60, 20), "UNAVAILABLE: gone", PromptTokens(40, 30)])
    assert str(talk) == "2 answers, 1 errors, 50% of prompt tokens cached"
    assert talk.failures == ("UNAVAILABLE: gone",)


def test_a_talk_without_an_answer_has_nothing_cached() -> None:
    assert str(Talk(["late"])) == "0 answers, 1 errors, 0% of prompt tokens cached"


def test_a_prompt_tells_what_was_cached() -> None:
    assert str(PromptTokens(60, 20)) == "20 of 60 prompt tokens cached"


def test_a_server_tells_how_many_requests_it_has_finished() -> None:
    assert serve_and_call(FakeEngine(), num_finished) == 7


def test_a_line_has_its_name_in_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    say("talk", "on")
    assert capsys.readouterr().out == "talk      on\n"
