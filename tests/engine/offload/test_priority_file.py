from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.engine.offload.priority_file import KeptPriority, PriorityFile

ROWS = [KeptPriority(bytes(32), 100, None), KeptPriority(b"\xff" * 32, 0, 1234.5)]


def test_what_was_written_is_read_once(tmp_path: Path) -> None:
    PriorityFile(tmp_path / "priorities").write(ROWS[1:])
    PriorityFile(tmp_path / "priorities").write(ROWS)
    assert PriorityFile(tmp_path / "priorities").take() == ROWS
    assert PriorityFile(tmp_path / "priorities").take() == []
    assert list(tmp_path.iterdir()) == []


def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    PriorityFile(tmp_path / "priorities").write([])
    assert (tmp_path / "priorities").stat().st_mode & 0o777 == 0o600
    assert PriorityFile(tmp_path / "priorities").take() == []


def test_a_file_that_is_cut_holds_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "priorities"
    PriorityFile(path).write(ROWS)
    path.write_bytes(path.read_bytes()[:-1])
    assert PriorityFile(path).take() == []
    assert "expected whole lines, got 95 bytes" in caplog.text
    assert not path.exists()
