import io
import os
import re
import struct
import sys
from types import ModuleType

import pytest

from radixkv.api.retention import Retention
from radixkv.service.commands.cli import main
from tests.service.command_line import launch, run_cli, usage_error
from tests.service.fake_engine import FakeEngine


@pytest.mark.parametrize("text", ["hello", "é€", "a\udcffb"])  # the last is a byte that is no UTF-8, as argv has it
def test_text_is_its_bytes(capsys, text):
    engine = FakeEngine()
    run_cli(capsys, engine, "prefill", "--text", text)
    assert engine.params[0].tokens == b"".join(bytes([b, 0, 0, 0]) for b in os.fsencode(text))


def test_text_goes_through_a_tokenizer(capsys, tmp_path, monkeypatch):
    class Tokenizer:
        def encode(self, text):
            return [len(text)]

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(path, *, local_files_only):
            assert local_files_only
            if path != str(tmp_path):
                raise OSError("not\nthere")
            return Tokenizer()

    stand_in = ModuleType("transformers")
    stand_in.AutoTokenizer = AutoTokenizer
    monkeypatch.setitem(sys.modules, "transformers", stand_in)
    engine = FakeEngine()
    assert run_cli(capsys, engine, "prefill", "--text", "hello", "--tokenizer", str(tmp_path))[0] == 0
    assert engine.params[0].tokens == b"\x05\0\0\0"
    code, _, err = run_cli(capsys, engine, "prefill", "--text", "a\udcff", "--tokenizer", str(tmp_path))
    assert (code, err) == (2, "radixkv: --tokenizer: expected text in UTF-8, got the byte 0xff\n")
    code, _, err = run_cli(capsys, engine, "prefill", "--tokens", "1", "--tokenizer", str(tmp_path))
    assert (code, err) == (2, "radixkv: --tokenizer: expected --text or --text-file with it, got --tokens\n")


@pytest.mark.parametrize("files", [{}, {"config.json": '{"model_type": "llama"}'}, {"tokenizer.json": "no"}])
def test_a_directory_without_a_tokenizer_is_one_line_and_exit_code_2(capsys, tmp_path, files):
    pytest.importorskip("transformers")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert main(["prefill", "--text", "hi", "--tokenizer", str(tmp_path)]) == 2
    message = f"radixkv: --tokenizer: expected a directory with a tokenizer, got {tmp_path}\n"
    assert capsys.readouterr() == ("", message)


def test_a_tokenizer_that_is_no_directory_is_refused_before_transformers_is_imported():
    program = (
        "import sys; sys.modules['transformers'] = None; from radixkv.service.commands.cli import main; "
        "sys.exit(main(['prefill', '--text', 'hi', '--tokenizer', '/nowhere']))"
    )
    message = "radixkv: --tokenizer: expected a directory with a tokenizer, got /nowhere\n"
    assert launch("-P", "-c", program) == (2, "", message)


def stdin_of(data):
    return io.TextIOWrapper(io.BytesIO(data))


@pytest.mark.parametrize("option", [["--text", "-"], ["--text-file", "-"]])
def test_text_comes_from_stdin_byte_for_byte(capsys, monkeypatch, option):
    engine = FakeEngine()
    monkeypatch.setattr("sys.stdin", stdin_of(b"a\xff\n"))
    assert run_cli(capsys, engine, "prefill", *option)[0] == 0
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
    assert run_cli(capsys, engines[1], "prefill", "--text-file", str(tmp_path / "text"))[0] == 0
    assert [engine.params[0].tokens for engine in engines] == [struct.pack("<2I", 1, 2), struct.pack("<I", 0xE9)]


@pytest.mark.parametrize("option", ["--text-file", "--tokens-file"])
def test_a_file_that_is_not_there_is_one_line(capsys, option):
    err = usage_error(capsys, "prefill", option, "/nowhere/prompt")
    assert f"{option}: expected a file, got /nowhere/prompt: No such file or directory" in err


@pytest.mark.parametrize("command", ["prefill", "generate"])
@pytest.mark.parametrize(("option", "urgency"), [([], 50), (["--urgency", "90"], 90)])
def test_urgency_is_the_place_in_the_queue(capsys, command, option, urgency):
    engine = FakeEngine()
    assert run_cli(capsys, engine, command, "--tokens", "1", *option)[0] == 0
    assert (engine.params[0].urgency, engine.params[0].retention) == (urgency, None)


def test_a_generation_asks_for_a_retention_too(capsys):
    engine = FakeEngine()
    assert run_cli(capsys, engine, "generate", "--tokens", "1", "--retention-priority", "80")[0] == 0
    assert engine.params[0].retention == Retention(80)


def test_priority_alone_names_neither(capsys):
    assert "unrecognized arguments: --priority" in usage_error(capsys, "prefill", "--tokens", "1", "--priority", "9")


def test_prefill_asks_for_a_retention_and_shows_the_grant(capsys):
    engine = FakeEngine()
    code, out, _ = run_cli(capsys, engine, "prefill", "--tokens", "1", "--retention-priority", "80", "--ttl-s", "2.5")
    assert code == 0
    assert engine.params[0].retention == Retention(80, 2.5)
    assert re.search(r"^retained +3 tokens \(2 refused\)$", out, re.MULTILINE)
    code, _, err = run_cli(capsys, engine, "prefill", "--tokens", "1", "--ttl-s", "2.5")
    assert (code, err) == (2, "radixkv: --ttl-s: expected --retention-priority with it, got none\n")
    for ttl in ("inf", "nan", "0"):
        code, _, err = run_cli(capsys, engine, "prefill", "--tokens", "1", "--retention-priority", "80", "--ttl-s", ttl)
        assert code == 2
        assert err.startswith("radixkv: retention.ttl: expected more than 0")


@pytest.mark.parametrize(
    ("option", "reads_and_writes"),
    [([], (True, True)), (["--no-read-cache"], (False, True)), (["--no-write-cache"], (True, False))],
)
def test_the_cache_is_read_and_written_unless_said_otherwise(capsys, option, reads_and_writes):
    engine = FakeEngine()
    run_cli(capsys, engine, "prefill", "--tokens", "1", *option)
    assert (engine.params[0].read_cache, engine.params[0].write_cache) == reads_and_writes
