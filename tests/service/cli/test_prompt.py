import io
import json
import os
import re
import struct
from types import SimpleNamespace

import pytest

from radixkv.api.retention import Retention
from radixkv.config.needed_package import missing_package
from radixkv.errors import ConfigError
from radixkv.model.tiny_files import write_tiny_files
from radixkv.service.cli.main import main, make_parser
from radixkv.service.cli.prompt import prompt_of
from tests.service.command_line import launch, run_cli, usage_error
from tests.service.fake_engine import FakeEngine
from tests.service.serving import WITHOUT_ENGINE, serve_and_call
from tests.service.text.tokenizers import byte_fallback, byte_level


@pytest.mark.parametrize("text", ["hello", "é€", "a\udcffb"])  # the last has a byte that is not UTF-8
def test_the_bytes_of_a_text_are_its_token_ids_if_requested(capsys, text):
    engine = FakeEngine()
    assert run_cli(capsys, engine, "prefill", "--text", text, "--bytes", model_path="tiny")[0] == 0
    assert engine.params[0].tokens == b"".join(bytes([b, 0, 0, 0]) for b in os.fsencode(text))


def test_text_goes_through_the_tokenizer_of_the_served_model(capsys):
    engine = FakeEngine()
    code, out, _ = run_cli(capsys, engine, "prefill", "--text", "~€", model_path="tiny")
    assert (code, engine.params[0].tokens) == (0, struct.pack("<4I", *"~€".encode()))
    assert re.search(r'^next token +142 "\ufffd"$', out, re.MULTILINE), "half a character"
    _, out, _ = run_cli(capsys, FakeEngine(), "prefill", "--text", "~", "--json", model_path="tiny")
    assert (json.loads(out)["next_token_id"], json.loads(out)["next_token_text"]) == (126, "~")


@pytest.mark.parametrize("command", ["prefill", "generate"])
def test_text_for_a_model_without_a_tokenizer_is_refused_with_the_choices(capsys, command):
    engine = FakeEngine()
    code, out, err = run_cli(capsys, engine, command, "--text", "hello")
    message = "--text: the served model has no tokenizer; use --tokenizer DIR, --bytes or --tokens"
    assert (code, out, err) == (2, "", f"radixkv: {message}\n")
    assert engine.futures == []


def test_a_served_tokenizer_that_can_not_be_loaded_is_one_line(capsys, tmp_path):
    (tmp_path / "tokenizer.json").write_text("no")
    code, _, err = run_cli(capsys, FakeEngine(), "prefill", "--text", "hello", model_path=str(tmp_path))
    assert code == 2
    assert err.startswith("radixkv: --text: the tokenizer of the service can't be used: expected a directory with a")
    assert err.count("\n") == 1


def test_the_option_tokenizer_overrides_the_served_tokenizer(capsys, tmp_path):
    write_tiny_files(tmp_path)
    engine = FakeEngine()
    assert run_cli(capsys, engine, "prefill", "--text", "~", "--tokenizer", str(tmp_path))[0] == 0
    assert engine.params[0].tokens == b"~\0\0\0"


LONG = 5000 * "n"  # more than a name may have


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "a\udcff"], "--text: expected text in UTF-8, got the byte 0xff; --bytes accepts any bytes"),
        (["--tokens", "1", "--bytes"], "--bytes: requires --text or --text-file, got --tokens"),
        (["--tokens", "1", "--chat"], "--chat: requires --text or --text-file, got --tokens"),
        (["--tokens", "1", "--tokenizer", "x"], "--tokenizer: requires --text or --text-file, got --tokens"),
        (["--text", "a", "--tokenizer", LONG], f"--tokenizer: expected a directory with a tokenizer, got {LONG}"),
        (["--text", "a", "--bytes", "--chat"], "--chat: requires a tokenizer, got --bytes"),
        (["--text", "a", "--system", "s"], "--system: requires --chat"),
    ],
)
def test_options_that_exclude_each_other_are_reported_in_one_line(capsys, arguments, message):
    code, _, err = run_cli(capsys, FakeEngine(), "generate", *arguments, model_path="tiny")
    assert (code, err) == (2, f"radixkv: {message}\n")


def test_a_tokenizer_and_bytes_exclude_each_other(capsys):
    assert "not allowed with" in usage_error(capsys, "prefill", "--text", "a", "--bytes", "--tokenizer", "x")


@pytest.mark.parametrize("system", [[], ["--system", "s"]])
def test_a_chat_goes_through_the_template(system):
    tokenizer = byte_level()
    messages = [{"role": "system", "content": "s"}] if system else []
    expected = tokenizer.encode_chat([*messages, {"role": "user", "content": "hi"}])
    arguments = make_parser().parse_args(["generate", "--text", "hi", "--chat", *system])
    client = SimpleNamespace(tokenizer=lambda: tokenizer)
    assert prompt_of(arguments, client).token_ids == expected


def test_a_tokenizer_without_a_template_refuses_a_chat():
    arguments = make_parser().parse_args(["generate", "--text", "hi", "--chat"])
    with pytest.raises(ConfigError, match="--chat: expected a tokenizer with a default chat template, got none"):
        prompt_of(arguments, SimpleNamespace(tokenizer=byte_fallback))


@pytest.mark.parametrize("files", [{}, {"config.json": '{"model_type": "llama"}'}, {"tokenizer.json": "no"}])
def test_a_directory_without_a_tokenizer_is_one_line_and_exit_code_2(capsys, tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert main(["prefill", "--text", "hi", "--tokenizer", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"radixkv: --tokenizer: expected a directory with a tokenizer, got {tmp_path}: ")


def test_a_tokenizer_that_is_no_directory_is_refused_before_transformers_is_imported():
    program = (
        "import sys; sys.modules['transformers'] = None; from radixkv.service.cli.main import main; "
        "sys.exit(main(['prefill', '--text', 'hi', '--tokenizer', '/nowhere']))"
    )
    message = "radixkv: --tokenizer: expected a directory with a tokenizer, got /nowhere\n"
    assert launch("-P", "-c", program) == (2, "", message)


@pytest.mark.parametrize("package", ["", "tokenizers"])
def test_text_needs_the_package_tokenizers_and_nothing_of_the_engine(package):
    program = WITHOUT_ENGINE + (
        f"sys.modules[{package!r}] = None\n"
        "from radixkv.service.cli.main import main\n"
        "code = main(sys.argv[1:])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "sys.exit(code)"
    )

    def talk(address):
        return launch("-P", "-c", program, "prefill", "--address", address, "--text", "~", "--json")

    code, out, err = serve_and_call(FakeEngine(), talk, "tiny")
    if package:
        assert (code, out, err) == (2, "", f"radixkv: {missing_package('tokenizers', 'text')}\n")
    else:
        assert (code, json.loads(out)["usage"]["prompt_tokens"], err) == (0, 1, "")


def stdin_of(data):
    return io.TextIOWrapper(io.BytesIO(data))


@pytest.mark.parametrize("option", [["--text", "-"], ["--text-file", "-"]])
def test_text_comes_from_stdin_byte_for_byte(capsys, monkeypatch, option):
    engine = FakeEngine()
    monkeypatch.setattr("sys.stdin", stdin_of(b"a\xff\n"))
    assert run_cli(capsys, engine, "prefill", *option, "--bytes")[0] == 0
    assert engine.params[0].tokens == b"a\0\0\0\xff\0\0\0\n\0\0\0"


@pytest.mark.parametrize("option", [["--tokens", "-"], ["--tokens-file", "-"]])
def test_token_ids_come_from_stdin(capsys, monkeypatch, option):
    engine = FakeEngine()
    monkeypatch.setattr("sys.stdin", stdin_of(b"1, 2\n3 4\n"))
    assert run_cli(capsys, engine, "generate", *option, "--max-new-tokens", "1")[0] == 0
    assert engine.params[0].tokens == struct.pack("<4I", 1, 2, 3, 4)


def test_a_prompt_comes_from_a_file(capsys, tmp_path):
    engines = FakeEngine(), FakeEngine()
    (tmp_path / "ids").write_text("1,2")
    (tmp_path / "text").write_bytes(b"\xe9")
    assert run_cli(capsys, engines[0], "prefill", "--tokens-file", str(tmp_path / "ids"))[0] == 0
    assert run_cli(capsys, engines[1], "prefill", "--text-file", str(tmp_path / "text"), "--bytes")[0] == 0
    assert [engine.params[0].tokens for engine in engines] == [struct.pack("<2I", 1, 2), struct.pack("<I", 0xE9)]


@pytest.mark.parametrize("option", ["--text-file", "--tokens-file"])
def test_a_file_that_is_not_there_is_one_line(capsys, option):
    err = usage_error(capsys, "prefill", option, "/nowhere/prompt")
    assert f"{option}: expected a file, got /nowhere/prompt: No such file or directory" in err


@pytest.mark.parametrize("command", ["prefill", "generate"])
@pytest.mark.parametrize(("option", "urgency"), [([], 50), (["--urgency", "90"], 90)])
def test_urgency_reaches_the_engine(capsys, command, option, urgency):
    engine = FakeEngine()
    assert run_cli(capsys, engine, command, "--tokens", "1", *option)[0] == 0
    assert (engine.params[0].urgency, engine.params[0].retention) == (urgency, None)


def test_a_generation_may_request_a_retention(capsys):
    engine = FakeEngine()
    assert run_cli(capsys, engine, "generate", "--tokens", "1", "--retention-priority", "80")[0] == 0
    assert engine.params[0].retention == Retention(80)


def test_there_is_no_option_priority(capsys):
    assert "unrecognized arguments: --priority" in usage_error(capsys, "prefill", "--tokens", "1", "--priority", "9")


def test_prefill_requests_a_retention_and_shows_the_grant(capsys):
    engine = FakeEngine()
    code, out, _ = run_cli(capsys, engine, "prefill", "--tokens", "1", "--retention-priority", "80", "--ttl-s", "2.5")
    assert code == 0
    assert engine.params[0].retention == Retention(80, 2.5)
    assert re.search(r"^retained +3 tokens \(2 refused\)$", out, re.MULTILINE)
    code, _, err = run_cli(capsys, engine, "prefill", "--tokens", "1", "--ttl-s", "2.5")
    assert (code, err) == (2, "radixkv: --ttl-s: requires --retention-priority\n")
    for ttl in ("inf", "nan", "0"):
        code, _, err = run_cli(capsys, engine, "prefill", "--tokens", "1", "--retention-priority", "80", "--ttl-s", ttl)
        assert code == 2
        assert err.startswith("radixkv: retention.ttl: expected more than 0")


@pytest.mark.parametrize(
    ("option", "reads_and_writes"),
    [([], (True, True)), (["--no-read-cache"], (False, True)), (["--no-write-cache"], (True, False))],
)
def test_the_cache_is_read_and_written_by_default(capsys, option, reads_and_writes):
    engine = FakeEngine()
    run_cli(capsys, engine, "prefill", "--tokens", "1", *option)
    assert (engine.params[0].read_cache, engine.params[0].write_cache) == reads_and_writes
