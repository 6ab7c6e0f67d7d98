"""`radixkv generate`: options, and the printed output while tokens arrive."""

import io
import json
import re

import pytest

from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.errors import StepFailed
from radixkv.service.cli.main import main
from tests.service.command_line import run_cli
from tests.service.fake_engine import FakeEngine
from tests.service.server.servicers.test_generate import continuation

# The fake engine's completion of 7, an ASCII bell: each token is the sum of all tokens before it, modulo 256.
BELLS = [7, 14, 28, 56, 112, 224, 192, 128]


def test_tokens_are_printed_on_stdout_and_then_statistics_on_stderr(capsys):
    code, out, err = run_cli(capsys, FakeEngine(), "generate", "--tokens", "1,2", "--max-new-tokens", "4")
    assert code == 0
    assert out == " ".join(map(str, continuation([1, 2], 4))) + "\n"
    table = err.splitlines()
    assert "generated    4 tokens, LENGTH" in table
    assert "  decode     0.00 ms" in table


def test_the_command_prints_one_json_object_and_nothing_else(capsys):
    code, out, err = run_cli(capsys, FakeEngine(), "generate", "--tokens", "1,2", "--max-new-tokens", "4", "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["token_ids"] == continuation([1, 2], 4)
    assert (answer["finished"], answer["finish_reason"]) == (True, "LENGTH")
    assert answer["usage"]["generated_tokens"] == 4


def test_the_command_passes_every_option(capsys):
    engine = FakeEngine()
    options = "--max-new-tokens 3 --temperature 0.5 --top-p 0.9 --seed 18446744073709551615 --stop-tokens 9,8"
    options += (
        " --top-k 5 --min-p 0.5 --repetition-penalty 1.5 --presence-penalty 1 --frequency-penalty -1 --min-tokens 2"
    )
    code, _, _ = run_cli(
        capsys,
        engine,
        "generate",
        "--text",
        "hi",
        "--bytes",
        *options.split(),
        "--ignore-eos",
        "--tenant",
        "t",
        "--no-read-cache",
    )
    sampling, params = engine.samplings[0], engine.params[0]
    assert code == 0
    assert (sampling.max_new_tokens, sampling.temperature, sampling.seed) == (3, 0.5, 2**64 - 1)
    assert sampling.top_p == pytest.approx(0.9)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ({9, 8}, True)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (5, 0.5, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.min_tokens) == (1.0, -1.0, 2)
    assert (params.caller.tenant, params.read_cache, params.write_cache) == ("t", False, True)


def test_the_command_refuses_in_one_line(capsys):
    code, out, err = run_cli(capsys, FakeEngine(), "generate", "--tokens", "1", "--top-p", "2")
    assert (code, out) == (1, "")
    assert err == "radixkv: INVALID_ARGUMENT: top_p: expected more than 0 and at most 1, got 2.0\n"


def test_the_answer_to_a_text_is_the_only_text_on_stdout(capsys):
    # The bytes of "0P" are 48 and 80. The answer is their sum, 128, which is no UTF-8, and then 0 and 0.
    arguments = ["generate", "--text", "0P", "--max-new-tokens", "3"]
    code, out, err = run_cli(capsys, FakeEngine(), *arguments, model_path="tiny")
    assert (code, out) == (0, "\ufffd\0\0\n")
    assert "generated    3 tokens, LENGTH" in err.splitlines()


def test_an_answer_that_ends_its_line_gets_no_empty_line(capsys):
    # The answer to the bytes 5 and 5 is their sum, 10, an end of line.
    arguments = ["generate", "--text", "\x05\x05", "--max-new-tokens", "1"]
    assert run_cli(capsys, FakeEngine(), *arguments, model_path="tiny")[:2] == (0, "\n")


def test_a_json_object_has_text_and_token_ids(capsys):
    code, out, _ = run_cli(
        capsys, FakeEngine(), "generate", "--text", "!", "--max-new-tokens", "2", "--json", model_path="tiny"
    )
    answer = json.loads(out)
    assert (code, answer["token_ids"], answer["text"]) == (0, [33, 66], "!B")
    _, out, _ = run_cli(capsys, FakeEngine(), "generate", "--tokens", "1", "--json", model_path="tiny")
    assert "text" not in json.loads(out)


def test_a_stop_string_ends_the_answer_and_is_not_printed(capsys):
    # The answer to "!", 33, is 33 and 66: "!B".
    options = ["--stop", "no", "--stop", "B", "--max-new-tokens", "400"]
    code, out, err = run_cli(capsys, FakeEngine(), "generate", "--text", "!", *options, model_path="tiny")
    assert (code, out) == (0, "!\n")
    assert "generated    2 tokens, STOP" in err.splitlines()
    _, out, _ = run_cli(capsys, FakeEngine(), "generate", "--text", "!", *options, "--json", model_path="tiny")
    answer = json.loads(out)
    assert (answer["text"], answer["token_ids"], answer["matched_stop"]) == ("!", [33, 66], "B")
    _, out, _ = run_cli(capsys, FakeEngine(), "generate", "--tokens", "33", *options, model_path="tiny")
    assert out.startswith("33 66\n"), "tokens are printed whole"


def test_text_of_a_model_cannot_control_the_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    _, out, _ = run_cli(capsys, FakeEngine(), "generate", "--tokens", "7", "--max-new-tokens", "8", model_path="tiny")
    assert out.startswith(" ".join(map(str, BELLS)))
    _, out, _ = run_cli(capsys, FakeEngine(), "generate", "--text", "\x07", "--max-new-tokens", "5", model_path="tiny")
    assert out.startswith(r"\x07\x0e\x1c8p" + "\n")


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("prompt", [["--tokens", "1,2"], ["--text", "!"]])
def test_an_error_in_the_middle_of_an_answer_starts_on_a_new_line(capsys, monkeypatch, prompt, is_terminal):
    engine = FakeEngine(is_gated=True)
    engine.failure = StepFailed("step: expected to end, got an error")

    class Stdout(io.StringIO):
        """Lets the engine fail as soon as something is printed."""

        def isatty(self):
            return is_terminal

        def write(self, text):
            engine.open_gate()
            return super().write(text)

    stdout = Stdout()
    monkeypatch.setattr("sys.stdout", stdout)
    code, _, err = run_cli(capsys, engine, "generate", *prompt, "--max-new-tokens", "4", model_path="tiny")
    assert code == 1
    assert re.fullmatch(r"[^\n]+\n", stdout.getvalue())
    assert err == "radixkv: INTERNAL: step: expected to end, got an error\n"


def test_an_error_in_the_middle_of_an_answer_leaves_no_json(capsys):
    engine = FakeEngine()
    engine.failure = StepFailed("step: expected to end, got an error")
    code, out, err = run_cli(capsys, engine, "generate", "--tokens", "1,2", "--max-new-tokens", "4", "--json")
    assert (code, out, err.count("\n")) == (1, "", 1)


@pytest.mark.parametrize("stop", ["", "x" * 257])
def test_a_stop_string_that_the_server_refuses_is_one_line(capsys, stop):
    code, _, err = run_cli(capsys, FakeEngine(), "generate", "--text", "!", "--stop", stop, model_path="tiny")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith("radixkv: INVALID_ARGUMENT: stop[0]: expected 1 to 256 characters, got ")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", None),
        ("--compression h2o --compression-tokens 64", Compression(CompressionPolicy.H2O, 64)),
        (
            "--compression streaming_llm --compression-tokens 64 --compression-sinks 0",
            Compression(CompressionPolicy.STREAMING_LLM, 64, num_sinks=0),
        ),
        (
            "--compression snapkv --compression-tokens 64 --compression-window 8",
            Compression(CompressionPolicy.SNAPKV, 64, window=8),
        ),
    ],
)
def test_compression_options_are_sent(capsys, options, expected):
    engine = FakeEngine()
    assert run_cli(capsys, engine, "generate", "--tokens", "1,2", *options.split())[0] == 0
    assert [sampling.compression for sampling in engine.samplings] == [expected]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--compression h2o", "--compression: requires --compression-tokens"),
        ("--compression-window 3", "--compression-window: requires --compression"),
        ("--compression h2o --compression-tokens 1", "compression.max_tokens: expected at least 2, got 1"),
        ("--compression h2o --compression-tokens 9 --compression-sinks 1", "compression.num_sinks: expected none"),
    ],
)
def test_invalid_compression_options_are_refused_before_the_call(capsys, options, message):
    engine = FakeEngine()
    code, _, err = run_cli(capsys, engine, "generate", "--tokens", "1,2", *options.split())
    assert code == 2
    assert message in err
    assert not engine.samplings


def test_invalid_compression_options_are_refused_before_the_tokenizer_is_fetched(capsys):
    call = ["generate", "--text", "a", "--address", "127.0.0.1:1", "--compression", "h2o", "--compression-tokens", "1"]
    assert main(call) == 2
    assert capsys.readouterr().err == "radixkv: compression.max_tokens: expected at least 2, got 1\n"
