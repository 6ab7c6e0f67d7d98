"""`radixkv doctor` without a log, against a server of a fake engine."""

from __future__ import annotations

import json

import pytest

from radixkv.service.cli.doctor_report import server_diagnosis_text
from radixkv.v1.cache_pb2 import DiagnosedCause, DiagnoseResponse
from tests.service.command_line import run_cli
from tests.service.diagnosed import diagnosed_engine
from tests.service.fake_engine import FakeEngine

SALT = "1 request loses at most 500 tokens at token 0: the same tokens are cached with another salt of the tenant."
# The cost of the first cause is 3 x 61,000 tokens, which are 62.0 % of 295,000, 3 x 6 s, and 2 per million tokens.
EXPECTED = f"""\
In the last 2m, 20 prompts with 1,000,000 tokens: 400,000 were reused (40.0 %).
12 prompts missed and computed 590,000 tokens. 6 of them, with 295,000 tokens, were examined; 1 of these had nothing \
similar in the cache.

1. 3 of 6 requests lose 61,000 tokens on average at token 37: a random id changes: 7 hexadecimal digits. Tenant acme.
     prompt   build [4f2a9c1...] tools
     earlier  build [b07e55d...] tools
   -> Remove the id from the prompt, keep one value for the whole conversation, or move it to the end.
   Costs 183,000 tokens (62.0 % of what the examined ones computed), 18s of computing, worth 0.37.

2. {SALT} Tenant acme.
   -> Use one salt for all requests that may share their prompts, not a different salt for each request.
   Costs up to 500 tokens (0.2 % of what the examined ones computed), worth 0.00.
"""


def test_the_text_has_the_causes_their_cost_and_the_advice(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_cli(capsys, diagnosed_engine("acme"), "doctor", "--price-per-million-tokens", "2")
    assert (code, err) == (0, "")
    assert out == EXPECTED


def test_a_tenant_and_the_number_of_causes_are_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    engine = diagnosed_engine("acme", "globex")
    code, out, _ = run_cli(capsys, engine, "doctor", "--tenant", "globex", "--top", "1", "--omit-cached-text", "--json")
    diagnosis = json.loads(out)
    assert (code, [each["tenant"] for each in diagnosis["causes"]], diagnosis["further_causes"]) == (0, ["globex"], 1)
    assert "sample" not in diagnosis["causes"][0] or diagnosis["causes"][0]["sample"] is None


def test_a_server_that_has_found_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_cli(capsys, diagnosed_engine(), "doctor")
    assert code == 0
    assert "No cause was found" in out


def test_a_server_without_a_profile_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run_cli(capsys, FakeEngine(), "doctor")
    assert code == 1
    assert "server.diagnosed_share is 0" in err


@pytest.mark.parametrize("option", [("--policy", "lru"), ("--bytes",), ("--min-lost-tokens", "3")])
def test_options_for_logs_need_a_log(capsys: pytest.CaptureFixture[str], option: tuple[str, ...]) -> None:
    code, _, err = run_cli(capsys, FakeEngine(), "doctor", *option)
    assert (code, err.count("\n")) == (2, 1)
    assert f"{option[0]}: expected a log" in err


def test_a_cause_of_a_newer_server_is_shown_with_its_text() -> None:
    cause = DiagnosedCause(cause="NEW", prompts=2, lost_tokens=10, what="something new happens", change="Change it.")
    text = server_diagnosis_text(DiagnoseResponse(causes=[cause], examined_misses=3, examined_tokens=100))
    assert "2 of 3 requests lose 5 tokens on average at token 0: something new happens." in text
    assert "-> Change it." in text
