"""`radixkv health`: exit codes for scripts and container health checks."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.wrappers_pb2 import Int32Value

from radixkv.service.cli.main import main
from tests.service.fake_engine import FakeEngine
from tests.service.server.auth.certificates import CredentialFiles
from tests.service.serving import serve_and_call


def health_command(*arguments: str) -> Callable[[str], int]:
    """Return a function that runs the command against an address, and returns its exit code."""

    def run(address: str) -> int:
        try:
            return main(["health", "--address", address, "--timeout-s", "60", *arguments])
        except SystemExit as ended:
            return int(str(ended.code))

    return run


def make_engine(*, is_healthy: bool = True) -> FakeEngine:
    engine = FakeEngine()
    engine.is_healthy = is_healthy
    return engine


@pytest.fixture(scope="module")
def credential_files(tmp_path_factory: pytest.TempPathFactory) -> CredentialFiles:
    return CredentialFiles(tmp_path_factory.mktemp("credential_files"))


@pytest.mark.parametrize("is_healthy", [True, False])
@pytest.mark.parametrize("has_tls", [False, True])
def test_the_exit_code_says_whether_a_server_serves_with_and_without_tls(
    credential_files: CredentialFiles, capsys: pytest.CaptureFixture[str], is_healthy: bool, has_tls: bool
) -> None:
    tls: dict[str, Any] = credential_files.tls if has_tls else {}
    assert serve_and_call(make_engine(is_healthy=is_healthy), health_command(), **tls) == (0 if is_healthy else 1)
    assert capsys.readouterr().out == ("SERVING\n" if is_healthy else "NOT_SERVING\n")


def test_a_certificate_of_an_authority_is_verified_if_the_authority_is_given(
    credential_files: CredentialFiles, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert (
        serve_and_call(
            make_engine(), health_command("--tls-ca", str(credential_files.ca_file), "--json"), **credential_files.tls
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out) == {"status": "SERVING"}
    other_authority = CredentialFiles(tmp_path)
    assert (
        serve_and_call(make_engine(), health_command("--tls-ca", str(other_authority.ca_file)), **credential_files.tls)
        == 1
    )


def test_no_token_is_sent_to_a_server_whose_certificate_is_not_verified(
    credential_files: CredentialFiles, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    received_keys: list[str] = []

    def check(request: bytes, context: grpc.ServicerContext) -> bytes:
        received_keys.extend(str(key) for key, _ in context.invocation_metadata())
        return Int32Value(value=1).SerializeToString()

    server = grpc.server(futures.ThreadPoolExecutor(1))
    handlers = {"Check": grpc.unary_unary_rpc_method_handler(check)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("grpc.health.v1.Health", handlers),))
    key, certificate = ((credential_files.folder / name).read_bytes() for name in ("server.key", "server.pem"))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
    server.start()
    monkeypatch.setenv("RADIXKV_TOKEN", "secret")
    try:
        assert health_command()(f"127.0.0.1:{port}") == 0
    finally:
        server.stop(None).wait()
    assert "user-agent" in received_keys
    assert "authorization" not in received_keys


def test_a_service_has_a_health_of_its_own_and_an_unknown_one_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve_and_call(make_engine(), health_command("--service", "radixkv.v1.PrefillService")) == 0
    assert serve_and_call(make_engine(), health_command("--service", "a.B")) == 1
    assert "NOT_FOUND" in capsys.readouterr().err


def test_an_address_with_a_scheme_of_grpc_is_tried_with_tls_too(
    credential_files: CredentialFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        serve_and_call(make_engine(), lambda address: health_command()(f"ipv4:{address}"), **credential_files.tls) == 0
    )
    assert capsys.readouterr().out == "SERVING\n"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "unix:/nowhere"])
def test_without_a_server_the_exit_code_is_1_and_one_line_says_why(
    capsys: pytest.CaptureFixture[str], address: str
) -> None:
    assert health_command()(address) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("radixkv: UNAVAILABLE: ")
