import asyncio
from pathlib import Path
from typing import Any

import pytest
import trustme

from radixkv.config import KVSourceConfig
from radixkv.engine.transfer.transfer import FleetAccess
from radixkv.errors import ConfigError, InvalidRequest, KVSourceUnusable
from radixkv.service.server.servicers import kv_sources
from radixkv.service.server.servicers.kv_sources import KVSources, require_sources

HERE = "127.0.0.1:50051"


@pytest.fixture
def made_clients(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of the clients that are made, in their order. No real client is made."""
    made: list[dict[str, Any]] = []

    def make_client(address: str, **options: Any) -> object:
        made.append(options)
        return object()

    monkeypatch.setattr(kv_sources, "AsyncClient", make_client)
    return made


def test_a_connection_is_made_once() -> None:
    async def run() -> None:
        sources = KVSources({"a": KVSourceConfig(HERE)})
        client = sources.client_of(HERE)
        assert sources.client_of(HERE) is client
        with pytest.raises(InvalidRequest, match=r"kv_source\.address: no section kv_sources"):
            sources.client_of("127.0.0.1:50052")
        await client.close()

    asyncio.run(run())


def test_a_fleet_may_name_any_source(made_clients: list[dict[str, Any]]) -> None:
    sources = KVSources({"a": KVSourceConfig(HERE)})
    fleet = FleetAccess("fleet", b"key")
    sources.client_of(HERE, fleet)
    other = sources.client_of("127.0.0.1:50052", fleet)
    assert [options["token"] for options in made_clients] == [None, "fleet"]
    assert sources.client_of("127.0.0.1:50052", fleet) is other
    with pytest.raises(InvalidRequest):
        sources.client_of("127.0.0.1:50053")


@pytest.mark.parametrize("address", ["", "nowhere", "127.0.0.1:0"])
def test_an_invalid_address_is_refused(address) -> None:
    with pytest.raises(
        InvalidRequest, match=r"^kv_source\.address: expected HOST:PORT with a port from 1 to 65535, got"
    ):
        KVSources({}).client_of(address, FleetAccess("fleet", b"key"))


def test_callers_do_not_see_missing_files_of_a_fleet(tmp_path: Path, caplog) -> None:
    with pytest.raises(
        KVSourceUnusable, match=r"^kv_source: this server's certificates for it cannot be used"
    ) as caught:
        KVSources({}).client_of(HERE, FleetAccess("fleet", b"key", str(tmp_path / "gone"), ""))
    assert str(tmp_path) not in str(caught.value)
    assert f"fleet: [Errno 2] No such file or directory: '{tmp_path}" in caplog.text


def test_a_fleet_token_is_sent_to_other_machines_only_over_tls(
    tmp_path: Path, made_clients: list[dict[str, Any]]
) -> None:
    ca = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(ca)

    KVSources({}).client_of("10.0.0.9:1", FleetAccess("fleet", b"key"))
    KVSources({}).client_of("10.0.0.9:1", FleetAccess("fleet", b"key", str(ca), "replica"))
    without_tls, with_tls = made_clients
    assert (without_tls["token"], without_tls["tls_ca"]) == (None, None)
    assert (with_tls["token"], with_tls["tls_ca"]) == ("fleet", str(ca))


def test_a_token_comes_from_a_file(tmp_path: Path, made_clients: list[dict[str, Any]]) -> None:
    (tmp_path / "token").write_text("secret-token\n")
    sources = KVSources({"a": KVSourceConfig(HERE, token_file=str(tmp_path / "token"))})

    sources.client_of(HERE)
    assert [options["token"] for options in made_clients] == ["secret-token"]


def test_files_that_can_not_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text(" \n")
    for name in ("absent", "empty"):
        with pytest.raises(ConfigError, match=r"kv_sources\.a\.token_file: "):
            KVSources({"a": KVSourceConfig(HERE, token_file=str(tmp_path / name))})


def test_a_token_is_not_sent_to_another_machine_without_tls(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret-token")
    with pytest.raises(ConfigError, match=r"kv_sources\.a: token: requires tls_ca") as caught:
        require_sources({"a": KVSourceConfig("10.0.0.1:50051", token_file=str(tmp_path / "token"))})
    assert "secret" not in str(caught.value)


def test_certificates_that_can_not_be_used_are_refused_before_the_first_call(tmp_path: Path) -> None:
    (tmp_path / "none.pem").write_text("no certificate")
    messages = {"absent": r"a\.tls_ca: expected a file of certificates", "none.pem": "a: tls_ca: the file contains no"}
    for name, message in messages.items():
        with pytest.raises(ConfigError, match=rf"^kv_sources\.{message}"):
            require_sources({"a": KVSourceConfig(HERE, tls_ca=str(tmp_path / name))})


def test_two_sections_with_one_address_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^kv_sources\.b\.address: kv_sources\.a has the same address"):
        require_sources({"a": KVSourceConfig(HERE), "b": KVSourceConfig(HERE)})


def test_callers_do_not_see_missing_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ca = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(ca)
    sources = KVSources({"a": KVSourceConfig(HERE, tls_ca=str(ca))})
    ca.unlink()
    with pytest.raises(
        KVSourceUnusable, match=r"^kv_source: this server's certificates for it cannot be used"
    ) as caught:
        sources.client_of(HERE)
    assert str(tmp_path) not in str(caught.value)
    assert str(tmp_path) in caplog.text
