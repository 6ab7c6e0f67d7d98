"""Refusals of what a configuration says of adapters, by name; tests/whole has what is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.config import AdapterConfig, Config
from radixkv.errors import ConfigError
from radixkv.startup.adapters import load_adapters, require_adapter_directory
from tests.service.fake_engine import FakeEngine


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.adapter_directory: expected a directory, got"):
        require_adapter_directory(
            Config.load(None, [f"model.adapter_directory={tmp_path}/none", "model.max_adapters=1"])
        )


def test_a_directory_without_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.max_adapters: expected at least 1"):
        require_adapter_directory(Config.load(None, [f"model.adapter_directory={tmp_path}"]))
    require_adapter_directory(Config.load(None, [f"model.adapter_directory={tmp_path}", "model.max_adapters=1"]))


def test_an_adapter_that_can_not_be_loaded_is_named_by_its_section() -> None:
    engine = FakeEngine()
    load_adapters({"law": AdapterConfig("/one")}, engine.adapters)
    assert engine.adapters.names_of("one") == ("law",)
    with pytest.raises(ConfigError, match=r"adapters\.tax\.path: adapter_config\.json: expected a file"):
        load_adapters({"tax": AdapterConfig("/broken")}, engine.adapters)
