"""`radixkv chat`: turns are answered with the conversation before them, and a failed turn does not end the chat."""

import io
import subprocess
import sys

import pytest

from radixkv.errors import ConfigError
from radixkv.service.cli import chat
from radixkv.service.client import InvalidArgument
from radixkv.service.client.text_answers import TextAnswer
from radixkv.service.text.tokenizer import Tokenizer
from tests.service.command_line import run_cli
from tests.service.fake_engine import FakeEngine


def converse(capsys, monkeypatch, lines, *options, engine=None):
    """Run `radixkv chat` with these lines on stdin; return the engine, the exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    engine = engine or FakeEngine()
    code, out, err = run_cli(capsys, engine, "chat", "--max-new-tokens", "3", *options, model_path="tiny")
    return engine, code, out, err


def prompts(engine):
    return [bytes(params.tokens) for params in engine.params]


def test_each_turn_continues_the_conversation(capsys, monkeypatch):
    engine, code, out, err = converse(capsys, monkeypatch, ["hi", "", "again", "/reset", "hi", "/exit", "never"])
    assert code == 0
    assert out.count("\n") >= 3
    lines = err.splitlines()
    assert len(lines) == len(engine.params) == 3
    assert all(line.startswith("[first token after ") for line in lines)
    assert all(" tokens from the cache]" in line for line in lines)
    first, second, third = prompts(engine)
    assert len(second) > len(first)
    assert third == first


def test_a_system_message_begins_each_conversation(capsys, monkeypatch):
    with_system, *_ = converse(capsys, monkeypatch, ["hi", "/reset", "hi"], "--system", "Be brief.")
    without, *_ = converse(capsys, monkeypatch, ["hi"])
    first, second = prompts(with_system)
    assert first == second != prompts(without)[0]


def test_a_turn_that_fails_is_reported_and_removed(capsys, monkeypatch):
    _, code, out, err = converse(capsys, monkeypatch, ["hi", "again"], "--top-p", "2")
    assert (code, out) == (0, "")
    assert err == 2 * "radixkv: INVALID_ARGUMENT: top_p: expected more than 0 and at most 1, got 2.0\n"
    conversations = []
    print_answer = chat.ChatSession._print_answer

    def fail_first(self):
        conversations.append([message["content"] for message in self._messages])
        if len(conversations) == 1:
            raise InvalidArgument("no")
        return print_answer(self)

    monkeypatch.setattr(chat.ChatSession, "_print_answer", fail_first)
    converse(capsys, monkeypatch, ["hi", "again"])
    assert conversations == [["hi"], ["again"]]


def test_an_error_in_the_middle_of_an_answer_starts_on_a_new_line(capsys, monkeypatch):
    next_chunk = TextAnswer.__next__

    def fail_after_one_chunk(self):
        if self.text:
            raise InvalidArgument("no")
        return next_chunk(self)

    monkeypatch.setattr(TextAnswer, "__next__", fail_after_one_chunk)
    _, code, out, err = converse(capsys, monkeypatch, ["hi"])
    assert (code, out.endswith("\n"), len(out) > 1) == (0, True, True)
    assert err == "radixkv: INVALID_ARGUMENT: no\n"


def test_a_model_that_cannot_chat_ends_the_command(capsys, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("no template")

    monkeypatch.setattr(Tokenizer, "encode_chat", refuse)
    _, code, out, err = converse(capsys, monkeypatch, ["hi"])
    assert (code, out, err) == (2, "", "radixkv: chat: no template\n")


def test_there_is_no_output_in_json(capsys, monkeypatch):
    _, code, out, err = converse(capsys, monkeypatch, [], "--json")
    assert (code, out) == (2, "")
    assert err.startswith("radixkv: --json: chat has no such output")


def test_ctrl_c_ends_an_answer_and_not_the_chat(capsys, monkeypatch):
    next_chunk = TextAnswer.__next__
    calls = []

    def interrupt_first_answer(self):
        calls.append(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return next_chunk(self)

    monkeypatch.setattr(TextAnswer, "__next__", interrupt_first_answer)
    _, code, _, err = converse(capsys, monkeypatch, ["hi", "hi"])
    assert code == 0
    assert err.count("[first token after ") == 1


@pytest.mark.usefixtures("forked_servers")
def test_the_server_that_a_chat_starts_ends_with_the_chat(capfd, monkeypatch):
    started = []
    popen = subprocess.Popen

    def popen_and_record(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen_and_record)
    with chat._run_server("tiny") as address:
        host, port = address.split(":")
        assert host == "127.0.0.1"
        assert int(port) > 0
        assert started[0].poll() is None
    assert started[0].poll() == 0


def test_a_server_that_does_not_start_says_why(capfd):
    with pytest.raises(ConfigError, match=r"^model\.path: expected .*/nowhere"), chat._run_server("/nowhere"):
        pytest.fail("the server has started")
