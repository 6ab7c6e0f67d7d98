from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from radixkv.durable_file import replace_file


def test_a_file_is_created_and_replaced_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "day.json"
    for data in (b"first", b"2"):
        replace_file(path, data)
        assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["day.json"]


def test_a_write_that_fails_leaves_the_previous_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "day.json"
    replace_file(path, b"first")

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="No space left"):
            replace_file(path, b"second")
    assert path.read_bytes() == b"first"
    replace_file(path, b"third")  # also over the incomplete file that was left
    assert path.read_bytes() == b"third"


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    replace = Path.replace

    def record_rename(path: Path, target: Path) -> Path:
        calls.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", lambda _: calls.append("fsync"))
    monkeypatch.setattr(Path, "replace", record_rename)
    replace_file(tmp_path / "day.json", b"data")
    assert calls == ["fsync", "rename", "fsync"]  # the file, its name, the directory
