from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from radixkv.config import Config
from radixkv.errors import ConfigError
from radixkv.startup import requirements
from radixkv.startup.requirements import require_secret_files, require_usable

SECRET_KEYS = (
    "server.tls_key",
    "events.curve_key_file",
    "tiers.secret_file",
    "tiers.encryption_key_file",
    "kv_sources.first.token_file",
)


def test_settings_without_requirements_are_usable(tmp_path: Path) -> None:
    require_usable(Config())
    require_usable(Config.load(None, [f"model.adapter_directory={tmp_path}", "model.max_adapters=1"]))


def test_other_machines_need_not_be_reachable() -> None:
    settings = ["tiers.redis_url=redis://127.0.0.1:1/0", "tiers.disk_path=/dev/null/x", "tiers.trusted=true"]
    require_usable(Config.load(None, settings))


SOURCE = "kv_sources.first.address=10.0.0.8:50051"
REDIS = "tiers.redis_url=redis://127.0.0.1:1/0"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            [REDIS],
            "tiers.redis_url: expected tiers.secret_file, so that K/V that others have modified is not used, got",
        ),
        ([SOURCE], "kv_sources.first: expected tiers.secret_file, so that K/V that others have modified is not used"),
        ([SOURCE, "tiers.trusted=true"], "kv_sources.first: expected tiers.secret_file"),
        ([SOURCE, "kv_sources.first.trusted=true", REDIS], "tiers.redis_url: expected tiers.secret_file"),
        (
            [SOURCE, "kv_sources.first.trusted=true", "kv_sources.other.address=10.0.0.9:50051"],
            "kv_sources.other: expected tiers.secret_file",
        ),
        (["stores.shelf.place=x"], "stores.shelf: expected tiers.secret_file"),
        (["stores.shelf.place=x", "tiers.trusted=true"], "stores.shelf: expected tiers.secret_file"),
    ],
)
def test_without_a_secret_stores_and_servers_must_be_trusted(
    settings: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "require_backend", lambda name: None)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}") as caught:
        require_usable(Config.load(None, settings))
    key = str(caught.value).partition(":")[0]
    trusted = f"{'tiers' if key.startswith('tiers') else key}.trusted"
    assert f"or set {trusted} if no one else can modify it" in str(caught.value)
    require_usable(Config.load(None, [*settings, f"{trusted}=true"]))
    (tmp_path / "secret").write_text("a secret of 32 bytes, or more")
    require_usable(Config.load(None, [*settings, f"tiers.secret_file={tmp_path}/secret"]))


def test_an_encryption_key_protects_stores_but_not_transfers(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("5a" * 32)
    key = f"tiers.encryption_key_file={tmp_path}/key"
    require_usable(Config.load(None, [REDIS, key]))
    with pytest.raises(ConfigError, match=r"^kv_sources\.first: expected tiers\.secret_file"):
        require_usable(Config.load(None, [SOURCE, key]))


def test_without_a_secret_the_directory_of_the_disk_tier_must_be_private(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(0o777)
    (tmp_path / "secret").write_text("a secret of 32 bytes, or more")
    disk = f"tiers.disk_path={tmp_path}/disk"
    with pytest.raises(ConfigError, match=r"^tiers\.disk_path: expected a directory that only user"):
        require_usable(Config.load(None, [disk]))
    for setting in ("tiers.trusted=true", f"tiers.secret_file={tmp_path}/secret"):
        require_usable(Config.load(None, [disk, setting]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["model.adapter_directory=/nowhere", "model.max_adapters=1"],
            "model.adapter_directory: expected a directory, got '/nowhere'",
        ),
        (["model.adapter_directory=/"], "model.max_adapters: expected at least 1 with model.adapter_directory"),
        (["adapters.law.path=/nowhere"], "adapters.law.path: adapter_config.json: expected a file in the adapter's"),
        (["tiers.disk_bytes=1000"], "tiers.disk_path: expected a directory with tiers.disk_bytes, got none"),
        (["tiers.disk_path="], "tiers.disk_path: expected a directory, got an empty path"),
        (["tiers.mooncake_master=nope"], "tiers.mooncake_master: expected HOST:PORT with a port from 1 to 65535, got"),
        (["tiers.secret_file=/nowhere"], "tiers.secret_file: expected a readable file, got /nowhere: No such file"),
        (["tiers.encryption_key_file=/dev/null"], "tiers.encryption_key_file: expected a readable file, got /dev/null"),
        (["tiers.redis_url=nope"], "tiers.redis_url: expected redis://HOST:PORT/DB, got something else"),
        (["tiers.mooncake_master=127.0.0.1:1"], "tiers.mooncake_master: the package mooncake-transfer-engine-non-cuda"),
        (["stores.drawer.place=x"], "stores.drawer: expected the name of an installed package's entry point"),
    ],
)
def test_unusable_settings_are_rejected(settings: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        require_usable(Config.load(None, settings))


def config_with_secret(key: str, path: Path) -> Config:
    settings = [f"{key}={path}"]
    if key == "server.tls_key":
        settings.append(f"server.tls_certificate={path}")
    if key.startswith("kv_sources"):
        settings.append("kv_sources.first.address=host:1")
    return Config.load(None, settings)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("ab" * 32)
    return path


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_a_secret_that_every_user_can_read_gets_a_warning(
    key: str, secret: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret.chmod(0o640)
    require_secret_files(config_with_secret(key, secret))
    assert caplog.text == ""
    secret.chmod(0o644)
    require_secret_files(config_with_secret(key, secret))
    assert f"{key}: every user of this machine can read {secret} (mode 0644); run chmod 600" in caplog.text


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_a_secret_that_every_user_can_write_is_refused(key: str, secret: Path) -> None:
    link = secret.with_name("link")
    link.symlink_to(secret)
    secret.chmod(0o602)
    with pytest.raises(ConfigError, match=rf"^{key}: expected a file that other users can't write, got .* mode 0602;"):
        require_secret_files(config_with_secret(key, link))


def test_missing_files_are_left_to_other_checks(tmp_path: Path) -> None:
    require_secret_files(config_with_secret("tiers.secret_file", tmp_path / "missing"))
    require_secret_files(Config())
