"""`radixkv explain` against a server of a fake engine."""

import json
import re

import pytest

from radixkv.service.cli.explain import _FINDINGS, explanation_text
from radixkv.v1.explain_pb2 import Difference, DifferenceKind, Excerpt, ExplainResponse
from radixkv.v1.prefill_pb2 import MissReason
from tests.fakes import publish
from tests.service.command_line import run_cli
from tests.service.fake_engine import FAKE, FakeEngine

SHARED = "You are a helpful assistant. "
TAIL = " and this is the rest of the prompt, which is long enough to be found again."


def engine_caching(*texts: str) -> FakeEngine:
    """Return an engine in whose cache the base model's prompts of these texts are, with a token per character."""
    engine = FakeEngine()
    for text in texts:
        publish(engine.cache, text, FAKE)
    return engine


def test_the_text_has_the_position_the_difference_and_the_advice(capsys):
    engine = engine_caching(SHARED + "At 10:32" + TAIL)
    engine.token_s = 0.01
    arguments = ("explain", "--bytes", "--text", SHARED + "At 10:41" + TAIL)
    code, out, err = run_cli(capsys, engine, *arguments, model_path=None)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    num_shared = len(SHARED + "At 10:")
    assert lines[:2] == [
        f"{num_shared} of {len(SHARED + 'At 10:41' + TAIL)} tokens are cached (DIVERGED).",
        f"The prompt diverges from another cached prompt after {num_shared} tokens:",
    ]
    prompt_line, cached_line = lines[3:5]
    assert f"[ {ord('4')} {ord('1')} ]" in prompt_line
    assert f"[ {ord('3')} {ord('2')} ]" in cached_line
    lost = f"The next {len(TAIL)} are equal, but cannot be reused (about 0.76 s of computing)."  # 0.01 s per token
    spans = "The difference spans 2 tokens of the prompt and 2 of the cached one."
    assert lines[6:9] == ["The prompts have different passages here.", spans, lost]
    assert lines[9].startswith("-> ")


def test_texts_are_shown_on_one_line_with_the_difference_in_brackets(capsys):
    engine = engine_caching(SHARED + "At 10:32\n" + TAIL)
    code, out, _ = run_cli(
        capsys, engine, "explain", "--bytes", "--text", SHARED + "At 10:41\n" + TAIL, model_path="tiny"
    )
    assert code == 0
    assert re.search(r"^  prompt  \. At 10:\[41]\\n and this is", out, re.MULTILINE)
    assert re.search(r"^  cached  \. At 10:\[32]\\n and this is", out, re.MULTILINE)
    assert "A date or a time differs." in out


def test_json_has_the_whole_response(capsys):
    engine = engine_caching("abcdefgh")
    code, out, _ = run_cli(capsys, engine, "explain", "--tokens", "97,98,7", "--json")
    explanation = json.loads(out)
    assert (code, explanation["left_at_token"], explanation["miss_reason"]) == (0, 2, "NONE")
    assert explanation["difference"]["branch"]["token_ids"] == [*map(ord, "cdefgh")]
    assert explanation["difference"]["kind"] == "UNCLASSIFIED"


def test_the_options_choose_the_namespace(capsys):
    engine = engine_caching("abcdefgh")
    out = run_cli(capsys, engine, "explain", "--tokens", "97,98,7,8", "--tenant", "acme")[1]
    assert out.startswith("0 of 4 tokens are cached (COLD). Nothing is cached for this tenant")


def test_the_cached_text_can_be_left_out(capsys):
    engine = engine_caching("abcdefgh")
    out = run_cli(capsys, engine, "explain", "--tokens", "97,98,7,8", "--omit-cached-text")[1]
    assert "prompt" in out
    assert "\n  cached" not in out


def test_a_prompt_that_was_computed_is_explained_too(capsys):
    engine = engine_caching("abcdefgh", "abXXXXXX")
    out = run_cli(capsys, engine, "explain", "--bytes", "--text", "abXXXXXX")[1]
    assert out.startswith("7 of 8 tokens are cached, but no other request has used those after the first 2.\n")


def test_a_prompt_that_differs_in_its_last_token_only_was_not_computed(capsys):
    out = run_cli(capsys, engine_caching("abcdefgh"), "explain", "--tokens", "97,98,7")[1]
    assert out.startswith("2 of 3 tokens are cached.\nThe prompt diverges from another cached prompt after 2 tokens:")


@pytest.mark.parametrize(
    ("left_at", "sentence"),
    [
        (0, "Nothing is cached for this tenant, adapter and salt that the prompt can be compared with."),
        (5, "After 5 tokens the prompt continues what is cached."),
        (9, "The prompt does not diverge from any other cached prompt."),
    ],
)
def test_without_a_difference_there_is_no_advice(left_at, sentence):
    response = ExplainResponse(prompt_tokens=9, cached_tokens=left_at, left_at_token=left_at)
    assert explanation_text(response) == f"{left_at} of 9 tokens are cached. {sentence}"


def test_the_segment_is_named():
    response = ExplainResponse(left_at_token=1, segment="tools", difference=Difference(prompt=Excerpt(token_ids=[7])))
    assert 'after 1 token in "tools":' in explanation_text(response)


def test_every_kind_has_an_advice():
    assert set(_FINDINGS) == set(DifferenceKind.values())


def test_control_characters_do_not_reach_the_terminal():
    excerpt = Excerpt(token_ids=[7], different_tokens=1, different_text="\x1b[2J")
    response = ExplainResponse(
        miss_reason=MissReason.DIVERGED,
        segment="\x1b[2J",
        left_at_token=1,
        difference=Difference(prompt=excerpt, branch=excerpt, before_text="\x9b2J"),
    )
    assert all(each.isprintable() for each in explanation_text(response).splitlines())
