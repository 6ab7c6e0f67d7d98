import pwd
import shutil
import stat
from pathlib import Path

import pytest

from radixkv.config.cache_directory import cache_directory, temporary_cache_directory


def test_the_directory_is_below_xdg_cache_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "radixkv"


@pytest.mark.parametrize("value", [None, "", "here"])
def test_without_an_absolute_xdg_cache_home_it_is_below_the_home_directory(
    value: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_directory() == tmp_path / ".cache" / "radixkv"


def test_a_user_without_a_home_directory_gets_a_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry(_: int) -> None:
        raise KeyError

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    removed: list[str] = []
    temporary_cache_directory.cache_clear()  # another test of this process may have made one
    monkeypatch.setattr("atexit.register", lambda *call, **_: removed.append(call[1]))
    try:
        folder = cache_directory()
        assert cache_directory() == folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert removed == [str(folder)], "at the end of the process"
    finally:
        shutil.rmtree(temporary_cache_directory())
        temporary_cache_directory.cache_clear()
