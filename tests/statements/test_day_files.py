from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from radixkv.api.statement import MAX_DAYS, DayUse, Use, day_number
from radixkv.errors import ConfigError, StoreUnavailable
from radixkv.statements.day_files import DayFiles

DAY = day_number("2026-11-28")
USE = DayUse(3600.5, {"acme": Use(requests=2, device_token_s=57_600.25), "": Use(host_hit_tokens=2**60), "ü\n": Use(1)})


@pytest.fixture
def files(tmp_path: Path) -> Iterator[DayFiles]:
    files = DayFiles.open(tmp_path / "made" / "here")
    yield files
    files.close()


def path_of(tmp_path: Path, name: str = "2026-11-28.json") -> Path:
    return tmp_path / "made" / "here" / name


def test_a_day_is_read_as_it_was_written(files: DayFiles, tmp_path: Path) -> None:
    assert files.read(DAY) is None
    files.write(DAY, DayUse(1.0, {}))
    files.write(DAY, USE)
    assert files.read(DAY) == USE
    assert files.read(DAY + 1) is None
    content = json.loads(path_of(tmp_path).read_text())
    assert content["tenants"]["acme"] == {"requests": 2, "device_token_s": 57_600.25}  # fields that are 0 are left out
    assert path_of(tmp_path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 2, "covered_s": 0, "tenants": {}}',
        '{"format": 1, "covered_s": 0}',
        '{"format": 1, "tenants": {}}',
        '{"format": 1, "covered_s": NaN, "tenants": {}}',
        '{"format": 1, "covered_s": 1' + 400 * "0" + ', "tenants": {}}',
        '{"format": 1, "covered_s": 0, "tenants": {"secret": 7}}',
        '{"format": 1, "covered_s": 0, "tenants": {"secret": {"requests": -1}}}',
        '{"format": 1, "covered_s": 0, "tenants": {"secret": {"requests": true}}}',
        '{"format": 1, "covered_s": 0, "tenants": {"secret": {"requests": "7"}}}',
        "\udcff",
        "[" * 100_000,
    ],
)
def test_a_damaged_file_is_renamed_and_logged(
    files: DayFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    damaged_bytes = text.encode("utf-8", "surrogateescape")
    for number in range(2):
        path_of(tmp_path).write_bytes(damaged_bytes)
        assert files.read(DAY) is None
        assert not path_of(tmp_path).exists()
        renamed_path = path_of(tmp_path, f"2026-11-28.json.damaged{'-1' * number}")
        assert renamed_path.read_bytes() == damaged_bytes
        assert renamed_path.name in caplog.records[-1].getMessage()
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert "secret" not in caplog.text
    files.write(DAY, USE)
    assert files.read(DAY) == USE


def test_the_log_does_not_report_a_rename_that_failed(
    files: DayFiles, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, target: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", fail)
    path_of(tmp_path).write_text("{")
    with pytest.raises(StoreUnavailable, match=r"\.json is damaged and cannot be renamed: Read-only file system"):
        files.read(DAY)
    assert caplog.text == ""


def test_a_field_of_a_later_version_is_no_damage(files: DayFiles, tmp_path: Path) -> None:
    text = '{"format": 1, "covered_s": 5, "tenants": {"a": {"requests": 1, "later": 2}}, "more": 1}'
    path_of(tmp_path).write_text(text)
    assert files.read(DAY) == DayUse(5.0, {"a": Use(requests=1)})


def test_a_file_that_cannot_be_read_is_an_error(files: DayFiles, tmp_path: Path) -> None:
    path_of(tmp_path).mkdir()
    with pytest.raises(StoreUnavailable, match=r"2026-11-28\.json cannot be read: Is a directory"):
        files.read(DAY)


def test_two_servers_cannot_use_a_directory(files: DayFiles, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"server\.statement_path: another process uses .*; give each server a"):
        DayFiles.open(tmp_path / "made" / "here")
    files.close()
    second = DayFiles.open(tmp_path / "made" / "here")
    with pytest.raises(ConfigError, match="another process uses"):
        DayFiles.open(tmp_path / "made" / "here")
    files._lock = os.dup(second._lock)  # so that the fixture can close `files` once more
    second.close()


def test_each_replica_uses_a_subdirectory_which_it_finds_again_after_a_restart(tmp_path: Path) -> None:
    first, second = DayFiles.open_for_replica(tmp_path), DayFiles.open_for_replica(tmp_path)
    assert [each._directory.name for each in (first, second)] == ["replica-0", "replica-1"]
    first.write(DAY, USE)
    first.close()
    restarted = DayFiles.open_for_replica(tmp_path)
    assert restarted.read(DAY) == USE
    restarted.close()
    second.close()


def test_a_directory_that_cannot_be_used_is_a_wrong_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"server\.statement_path: expected a directory that can be written and locked"
    ):
        DayFiles.open(tmp_path / "file")


@pytest.mark.parametrize("open_files", [DayFiles.open, DayFiles.open_for_replica])
def test_a_file_system_without_locks_is_not_another_process(
    open_files: Callable[[Path], DayFiles], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(ConfigError, match="No locks available"):
        open_files(tmp_path)


def test_days_are_deleted_after_400_and_other_files_are_kept(files: DayFiles, tmp_path: Path) -> None:
    for day in (DAY - MAX_DAYS, DAY - MAX_DAYS + 1, DAY):
        files.write(day, USE)
    other = path_of(tmp_path, "notes.json")
    other.touch()
    files.prune(DAY)
    assert [files.read(day) for day in (DAY - MAX_DAYS, DAY - MAX_DAYS + 1, DAY)] == [None, USE, USE]
    assert other.exists()
