"""The commands of docs/deploy/tls.md, run verbatim, with a fake engine."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.free_port import free_port
from tests.patience import PATIENCE_S
from tests.service.command_line import LAUNCHER

PAGE = Path(__file__).parents[2] / "docs" / "deploy" / "tls.md"
SYSTEM_PATH = "/usr/bin:/bin"
CODE_BLOCK = re.compile(r"^```(console|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def shell(tmp_path):
    """Return a function that runs a command in a directory, where `radixkv` uses a fake engine instead of a model."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    # Only `serve` gets the fake engine; the other commands start in a tenth of the time without it.
    (bin_folder / "radixkv").write_text(
        f'#!/bin/sh\nif [ "$1" = serve ]; then exec "{sys.executable}" "{LAUNCHER}" open "$@"; fi\n'
        f'exec "{sys.executable}" -m radixkv "$@"\n'
    )
    (bin_folder / "radixkv").chmod(0o755)
    processes = []

    def start(command: str) -> subprocess.Popen[str]:
        environment = {
            "PATH": f"{bin_folder}:{SYSTEM_PATH}",
            "HOME": str(tmp_path),
            "PYTHONPATH": str(PAGE.parents[2]),
        }
        process = subprocess.Popen(
            ["/bin/sh", "-c", command.replace("radixkv serve", "exec radixkv serve")],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def contains_lines(output: str, documented_lines: list[str]) -> bool:
    """Return whether the output contains each line; `...` matches anything, and whitespace is collapsed."""
    lines = [" ".join(line.split()) for line in output.splitlines()]
    patterns = [re.escape(line).replace(re.escape("..."), ".*") for line in documented_lines]
    return all(any(re.fullmatch(pattern, line) for line in lines) for pattern in patterns)


def test_the_commands_on_the_page_work(shell, tmp_path):
    text = PAGE.read_text(encoding="utf-8").replace("50051", str(free_port())).replace("9400", str(free_port()))
    server = None
    num_commands = 0
    for language, block in CODE_BLOCK.findall(text):
        if language == "toml":
            name, _, content = block.partition("\n")
            (tmp_path / name.removeprefix("# ")).write_text(content)
            continue
        for step in block.removeprefix("$ ").split("\n$ "):
            command, *documented_lines = step.strip().split("\n")
            num_commands += 1
            program = command.split()[0]
            is_available = program in ("radixkv", "umask") or shutil.which(program, path=SYSTEM_PATH) is not None
            if not is_available:
                continue
            process = shell(command)
            if command.startswith("radixkv serve"):
                server = process
                # The log of the server is in the same output.
                line = next((line for line in process.stdout if line.startswith("listening")), "")
                assert line.strip() == documented_lines[0]
            else:
                output, _ = process.communicate(timeout=PATIENCE_S)
                assert contains_lines(output, documented_lines), (command, output)
    assert num_commands == 19
    assert server.wait(PATIENCE_S) == 0
