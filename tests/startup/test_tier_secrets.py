from __future__ import annotations

import re
from pathlib import Path

import pytest

from radixkv.config import TiersConfig
from radixkv.errors import ConfigError
from radixkv.startup.tier_secrets import ciphers_of, secret_of


def test_without_secret_files_there_is_no_secret_and_no_cipher() -> None:
    assert secret_of(TiersConfig()) == b""
    assert ciphers_of(TiersConfig()) is None


def test_white_space_around_a_secret_is_ignored(tmp_path: Path) -> None:
    secrets = []
    for name, text in (
        ("a", "between the two of us"),
        ("b", " between the two of us\n"),
        ("c", "between the two of them"),
    ):
        (tmp_path / name).write_text(text)
        secrets.append(secret_of(TiersConfig(secret_file=str(tmp_path / name))))
    assert secrets[0] == secrets[1] != secrets[2]


def test_a_key_file_gives_each_tenant_a_cipher_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="the extra `encryption` is not installed")
    (tmp_path / "key").write_text("ab" * 32 + "\n")
    ciphers = ciphers_of(TiersConfig(encryption_key_file=str(tmp_path / "key")))
    assert ciphers is not None
    assert ciphers.of("acme") is not ciphers.of("globex")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            TiersConfig(secret_file="/nowhere"),
            "tiers.secret_file: expected a readable file, got /nowhere: No such file or directory",
        ),
        (
            TiersConfig(secret_file="/dev/null"),
            "tiers.secret_file: expected a readable file, got /dev/null: not a regular file but a device",
        ),
        (
            TiersConfig(secret_file="EMPTY"),
            "tiers.secret_file: expected at least 16 bytes, such as the output of `openssl rand -hex 32`, got 0",
        ),
        (
            TiersConfig(secret_file="SHORT"),
            "tiers.secret_file: expected at least 16 bytes, such as the output of `openssl rand -hex 32`, got 15",
        ),
        (
            TiersConfig(encryption_key_file="/nowhere"),
            "tiers.encryption_key_file: expected a readable file, got /nowhere: No such file or directory",
        ),
        (TiersConfig(encryption_key_file=""), "tiers.encryption_key_file: expected a readable file, got an empty path"),
        (
            TiersConfig(encryption_key_file="EMPTY"),
            "tiers.encryption_key_file: expected 64 hexadecimal digits in the file, got something else",
        ),
    ],
)
def test_unusable_secret_files_are_rejected(
    config: TiersConfig, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("EMPTY").touch()
    Path("SHORT").write_text("  fifteen_letters\n")
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        _ = secret_of(config), ciphers_of(config)
