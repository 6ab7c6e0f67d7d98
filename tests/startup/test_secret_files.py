from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.config import Config
from radixkv.errors import ConfigError
from radixkv.startup.secret_files import require_secret_files

KEYS = (
    "server.tls_key",
    "events.curve_key_file",
    "tiers.secret_file",
    "tiers.encryption_key_file",
    "kv_sources.first.token_file",
)


def config_of(key: str, path: Path) -> Config:
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


@pytest.mark.parametrize("key", KEYS)
def test_a_secret_that_every_user_can_read_gets_a_warning(
    key: str, secret: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret.chmod(0o640)
    require_secret_files(config_of(key, secret))
    assert caplog.text == ""
    secret.chmod(0o644)
    require_secret_files(config_of(key, secret))
    assert f"{key}: every user of this machine can read {secret} (mode 0644); run chmod 600" in caplog.text


@pytest.mark.parametrize("key", KEYS)
def test_a_secret_that_every_user_can_write_is_refused(key: str, secret: Path) -> None:
    link = secret.with_name("link")
    link.symlink_to(secret)
    secret.chmod(0o602)
    with pytest.raises(ConfigError, match=rf"^{key}: expected a file that other users can't write, got .* mode 0602;"):
        require_secret_files(config_of(key, link))


def test_missing_files_are_left_to_other_checks(tmp_path: Path) -> None:
    require_secret_files(config_of("tiers.secret_file", tmp_path / "missing"))
    require_secret_files(Config())
