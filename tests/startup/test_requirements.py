from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from radixkv.config import Config
from radixkv.errors import ConfigError
from radixkv.startup.requirements import require_usable


def test_settings_without_requirements_are_usable(tmp_path: Path) -> None:
    require_usable(Config())
    require_usable(Config.load(None, [f"model.adapter_directory={tmp_path}", "model.max_adapters=1"]))


def test_other_machines_need_not_be_there() -> None:
    require_usable(Config.load(None, ["tiers.redis_url=redis://127.0.0.1:1/0", "tiers.disk_path=/dev/null/x"]))


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
        (["tiers.encryption_key_file=/dev/null"], "tiers.encryption_key_file: expected 64 hexadecimal digits"),
        (["tiers.redis_url=nope"], "tiers.redis_url: expected redis://HOST:PORT/DB, got something else"),
        (["tiers.mooncake_master=127.0.0.1:1"], "tiers.mooncake_master: the package mooncake-transfer-engine-non-cuda"),
        (["stores.drawer.place=x"], "stores.drawer: expected the name of an installed package's entry point"),
    ],
)
def test_unusable_settings_are_rejected(settings: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        require_usable(Config.load(None, settings))
