from __future__ import annotations

import re
import sys

import pytest

from radixkv.config.needed_package import missing_package, require_package
from radixkv.errors import ConfigError


def test_an_installed_package_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)  # a module of Python that prints a text when imported
    require_package("a.b", "this", "zen", "poems")
    assert "this" not in sys.modules


def test_the_error_names_the_command_that_installs_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "this", None)
    with pytest.raises(ConfigError, match=f"^{re.escape('a.b: ' + missing_package('zen', 'poems'))}$"):
        require_package("a.b", "this", "zen", "poems")
    assert missing_package("zen", "poems").endswith("pip install '.[poems]'")


@pytest.mark.parametrize("module", ["no_such_package.part", "radixkv.no_such_part"])
def test_a_key_whose_module_is_missing_is_refused(module: str) -> None:
    with pytest.raises(ConfigError, match=r"a\.b: the package zen is missing; .*pip install '\.\[poems\]'"):
        require_package("a.b", module, "zen", "poems")
