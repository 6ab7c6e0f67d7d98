import importlib.util

import pytest

from radixkv.config import ServerConfig
from radixkv.errors import ConfigError
from radixkv.service.server.auth.requirements import require_secure

from .certificates import CredentialFiles


@pytest.fixture(scope="module")
def credential_files(tmp_path_factory):
    return CredentialFiles(tmp_path_factory.mktemp("credential_files"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_needs_no_credentials(host):
    require_secure(ServerConfig(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "example.org"])
def test_other_hosts_are_refused_without_credentials(host):
    with pytest.raises(ConfigError, match=r"server\.host: expected 127\.0\.0\.1, ::1 or localhost without server\.tok"):
        require_secure(ServerConfig(host=host))


def test_tls_alone_does_not_allow_a_host(credential_files):
    keys = {key: credential_files.tls[key] for key in ("tls_certificate", "tls_key")}
    with pytest.raises(ConfigError, match=r"server\.host"):
        require_secure(ServerConfig(host="0.0.0.0", **keys))


def test_tls_and_tokens_allow_a_host(credential_files):
    require_secure(ServerConfig(host="0.0.0.0", **credential_files.tls))
    require_secure(ServerConfig(host="0.0.0.0", **credential_files.mutual_tls))


def test_insecure_allows_a_host_and_logs_who_can_reach_it(caplog):
    require_secure(ServerConfig(host="0.0.0.0", insecure=True))
    assert "anyone who can reach 0.0.0.0 may make every call" in caplog.text


@pytest.mark.parametrize(("host", "is_in_container"), [("127.0.0.1", True), ("127.0.0.1", False), ("0.0.0.0", True)])
def test_a_server_on_the_loopback_of_a_container_logs_how_to_admit_other_clients(
    caplog, tmp_path, host, is_in_container
):
    mark = tmp_path / ".dockerenv"
    if is_in_container:
        mark.touch()
    require_secure(ServerConfig(host=host, insecure=host == "0.0.0.0"), [tmp_path / "other", mark])
    has_hint = "add --host 0.0.0.0 --insecure" in caplog.text
    assert has_hint is (host == "127.0.0.1" and is_in_container)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_tokens_without_tls_are_refused(credential_files, host):
    with pytest.raises(ConfigError, match=r"server\.tokens_file: requires server\.tls_certificate"):
        require_secure(ServerConfig(host=host, tokens_file=credential_files.tls["tokens_file"]))


def test_behind_a_proxy_that_terminates_tls_tokens_are_still_required(credential_files, caplog):
    require_secure(ServerConfig(host="0.0.0.0", tokens_file=credential_files.tls["tokens_file"], insecure=True))
    assert "anyone" not in caplog.text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tls_certificate", "tokens_file"}, r"server\.tls_certificate, tls_key: each requires the other"),
        ({"tls_key"}, r"server\.tls_certificate, tls_key: each requires the other"),
        ({"client_ca", "tokens_file"}, r"server\.client_ca: requires server\.tls_certificate"),
        ({"client_ca", "tls_certificate", "tls_key"}, r"server\.client_ca: requires server\.tokens_file"),
    ],
)
def test_keys_are_refused_without_the_keys_that_they_require(credential_files, keys, message):
    with pytest.raises(ConfigError, match=message):
        require_secure(ServerConfig(**{key: credential_files.mutual_tls[key] for key in keys}))


def test_client_certificates_are_refused_without_the_package_that_reads_them(credential_files, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cryptography" else find_spec(name))
    require_secure(ServerConfig(**credential_files.tls))
    with pytest.raises(ConfigError, match=r"^server.client_ca: the package cryptography is missing.*\.\[encryption\]"):
        require_secure(ServerConfig(**credential_files.mutual_tls))


def test_files_are_read_before_a_model_is_loaded(credential_files, tmp_path):
    broken = tmp_path / "tokens.toml"
    broken.write_text("credentials = 1")
    with pytest.raises(ConfigError, match=r"server\.tokens_file: the file may have only entries"):
        require_secure(ServerConfig(**{**credential_files.tls, "tokens_file": str(broken)}))
