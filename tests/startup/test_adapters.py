"""Loading of the configured adapters at startup. `tests/whole` tests requests with adapters."""

from __future__ import annotations

import pytest

from radixkv.config import AdapterConfig
from radixkv.errors import ConfigError
from radixkv.startup.adapters import load_adapters
from tests.service.fake_engine import FakeEngine


def test_an_adapter_that_cannot_be_loaded_is_reported_with_its_section() -> None:
    engine = FakeEngine()
    load_adapters({"law": AdapterConfig("/one")}, engine.adapters)
    assert engine.adapters.names_of("one") == ("law",)
    with pytest.raises(ConfigError, match=r"adapters\.tax\.path: adapter_config\.json: expected a file"):
        load_adapters({"tax": AdapterConfig("/broken")}, engine.adapters)
