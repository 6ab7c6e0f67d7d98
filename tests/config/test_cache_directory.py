from pathlib import Path

import pytest

from radixkv.config.cache_directory import cache_directory


def test_it_is_where_the_system_keeps_such_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "radixkv"


@pytest.mark.parametrize("value", [None, "", "here"])
def test_without_an_absolute_folder_it_is_in_the_users(
    value: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_directory() == tmp_path / ".cache" / "radixkv"
