"""Runs the `radixkv` command in this process, against a fake engine, or in separate processes."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from radixkv.service.cli.main import main
from tests.patience import PATIENCE_S
from tests.service.serving import serve_and_call

LAUNCHER = str(Path(__file__).parent / "serve_fake.py")


def run_cli(capsys, engine, *arguments, model_path: str | None = None) -> tuple[int, str, str]:
    """Run a command against a server; return its exit code, stdout and stderr."""

    def talk(address: str) -> int:
        return main([*arguments, "--address", address])

    code = serve_and_call(engine, talk, model_path)
    return code, *capsys.readouterr()


def usage_error(capsys, *arguments) -> str:
    """Run a command whose arguments do not parse; return the line that it prints on stderr."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    assert caught.value.code == 2
    assert out == ""
    assert err.count("\n") == 1
    return err


@contextlib.contextmanager
def fake_service(*arguments, gate: str = "open") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a service with a fake engine in a process of its own (serve_fake.py); yield the process and its address."""
    command = [sys.executable, LAUNCHER, gate, "serve", "--port", "0", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, stdin=subprocess.DEVNULL
    )
    try:
        assert select.select([process.stdout], [], [], PATIENCE_S)[0]
        line = process.stdout.readline()
        match = re.fullmatch(r"listening on (127\.0\.0\.1:[1-9]\d*)\n", line)
        assert match, (line, process.stderr.read() if not line else "")
        yield process, match[1]
    finally:
        process.kill()
        process.communicate()


def launch(*arguments, stdin: bytes = b"") -> tuple[int, str, str]:
    """Run Python with these arguments until it exits; return its exit code, stdout and stderr."""
    command = [sys.executable, *arguments]
    completed = subprocess.run(command, capture_output=True, input=stdin, timeout=PATIENCE_S, check=False)
    return completed.returncode, completed.stdout.decode(), completed.stderr.decode()


def replace_build_engine(monkeypatch, build_engine) -> None:
    """Let `radixkv serve` in this process build its engine with `build_engine`."""
    stand_in = ModuleType("radixkv.startup.build_engine")
    stand_in.build_engine = build_engine
    monkeypatch.setitem(sys.modules, "radixkv.startup.build_engine", stand_in)
