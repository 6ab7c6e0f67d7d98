"""All programs of docs/examples are run, and the calls of all grpcurl commands are made, against one server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf import json_format

from tests.patience import PATIENCE_S
from tests.service.command_line import fake_service
from tests.service.server.auth.certificates import TOKENS, CredentialFiles
from tests.service.server.auth.reflected_calls import described_methods, status_of_call

FOLDER = Path(__file__).parents[2] / "docs" / "examples"
OUTPUTS = {
    "prefill.py": ["0 cached, 200 computed, 200 in all", "199 cached, 1 computed, 200 in all"],
    "stream.py": ["turn 1: 0 of 100 tokens cached", "turn 2: 107 of 111 tokens cached"],
    "public_prefix.py": [
        "256 tokens in 4 blocks",
        "example-one: 256 public, 3 computed",
        "example-two: 256 public, 3 computed",
    ],
    "retain.py": ["128 granted, 0 refused, 0 not cached"],
    "hold_renew_release.py": ["128 tokens are held, in blocks of 64", "renewed: True", "released"],
    "purge.py": ["2 blocks freed", "0 tokens would be reused"],
    "events.py": ["begins with a snapshot: True", "stored tokens up to 363"],
}
# Patterns of lines: the model's answers may differ between processors, since the last bits of logits do.
TEXT_OUTPUTS = {
    "text.py": [
        r"And the Lord said unto Moses,.+",
        r"'.*'",
        r"9 of 10 tokens of the prompt were cached",
    ],
    "chat.py": [
        r"user: Hello",
        r"assistant: .+",
        r"0 of \d\d tokens of the prompt were cached",
        r"user: Where is my father\?",
        r"assistant: .+",
        r"\d\d of \d\d tokens of the prompt were cached",
    ],
}
COMMANDS = re.findall(r"^\$ (grpcurl .+)$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)


def output_of(name: str, *arguments: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(FOLDER / name), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = [sys.executable, "-m", "radixkv.service", "serve", "--model", "tiny", "--port", "0"]
    with (
        (tmp_path_factory.mktemp("examples") / "log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as server,
    ):
        assert server.stdout is not None
        yield server.stdout.readline().removeprefix("listening on ").strip()
        server.terminate()
        server.communicate(timeout=PATIENCE_S)


def test_the_page_names_every_example() -> None:
    files = {path.name for path in FOLDER.glob("*.py")}
    # tests/telemetry/test_otlp.py runs print_spans.py
    assert files == {*OUTPUTS, *TEXT_OUTPUTS, "tls_token.py", "print_spans.py"}
    assert set(re.findall(r"^\| \[(\w+\.py)\]\(\1\)", (FOLDER / "README.md").read_text(), re.MULTILINE)) == files


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_example_prints_what_it_should(address: str, name: str) -> None:
    assert output_of(name, address) == OUTPUTS[name]


@pytest.mark.parametrize("name", TEXT_OUTPUTS)
def test_an_example_with_text_prints_the_models_answer(address: str, name: str, tmp_path: Path) -> None:
    lines = output_of(name, address, XDG_CACHE_HOME=str(tmp_path))
    assert len(lines) == len(TEXT_OUTPUTS[name])
    for pattern, line in zip(TEXT_OUTPUTS[name], lines, strict=True):
        assert re.fullmatch(pattern, line), line


def test_the_tls_example_is_admitted_as_its_tenant_only(tmp_path: Path) -> None:
    credential_files = CredentialFiles(tmp_path)
    settings = [
        argument
        for key, value in credential_files.tls.items()
        for argument in ("--set", f"server.{key}={json.dumps(value)}")
    ]
    with fake_service(*settings) as (_, tls_address):
        printed = output_of("tls_token.py", tls_address, str(credential_files.ca_file), RADIXKV_TOKEN=TOKENS["acme"])
    assert printed == ["100 tokens as the tenant that the token names", "PERMISSION_DENIED"]


@pytest.mark.parametrize("arguments", [(), ("localhost:50051", "ca.pem")], ids=["no arguments", "no token"])
def test_the_tls_example_names_missing_arguments(arguments: tuple[str, ...]) -> None:
    without_token = {name: value for name, value in os.environ.items() if name != "RADIXKV_TOKEN"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / "tls_token.py"), *arguments],
        env=without_token,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith("tls_token.py ADDRESS CA_FILE, with the token in RADIXKV_TOKEN.")
    assert "Traceback" not in done.stderr


async def make_grpcurl_calls(address: str) -> dict[str, grpc.StatusCode]:
    """Make the call of each grpcurl command with the message types that reflection describes; return the statuses."""
    statuses = {}
    async with grpc.aio.insecure_channel(address) as channel:
        methods = {method.path: method for method in await described_methods(channel)}
        for command in COMMANDS:
            program, *arguments = shlex.split(command)
            body = arguments.pop(arguments.index("-d") + 1) if "-d" in arguments else "{}"
            security, *_, target, name = arguments
            assert (program, security, target) == ("grpcurl", "-plaintext", "127.0.0.1:50051")
            if name == "list":
                assert methods
                continue
            method = methods[f"/{name}"]
            request = json_format.Parse(body, method.request())
            statuses[command] = await status_of_call(channel, method, request)
    return statuses


def test_the_call_of_each_grpcurl_command_is_answered(address: str) -> None:
    statuses = asyncio.run(asyncio.wait_for(make_grpcurl_calls(address), PATIENCE_S))
    assert set(statuses.values()) == {grpc.StatusCode.OK}, statuses
    assert len(statuses) == len(COMMANDS) - 1 == 10, "every command but `list` makes a call"


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="grpcurl is not on PATH")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.rpartition("/")[2])
def test_each_grpcurl_command_is_answered(address: str, command: str) -> None:
    program, *arguments = shlex.split(command.replace("127.0.0.1:50051", address))
    is_endless = command.endswith("/Subscribe")
    deadline = ["-max-time", "3"] if is_endless else []
    done = subprocess.run(
        [program, *deadline, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    if is_endless:
        assert "DeadlineExceeded" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
