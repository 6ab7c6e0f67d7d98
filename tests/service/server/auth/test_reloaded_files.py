import gc
import logging
import os
import threading

import pytest

from radixkv.config.regular_file import read_named
from radixkv.errors import ConfigError
from radixkv.service.server.auth import reloaded_files
from radixkv.service.server.auth.reloaded_files import ReloadedFiles
from tests.fakes import FakeClock
from tests.patience import PATIENCE_S, wait_until
from tests.started_threads import started_threads


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_text("first")
    return path


def make_reloaded(file, clock, reads=None, errors=()):
    """Return the reloaded text of a file.

    Each read adds an item to `reads`. The reads after the first one raise one of `errors` each, until all were raised.
    """
    errors = iter(errors)

    def read():
        if reads is not None:
            reads.append(1)
            if len(reads) > 1 and (error := next(errors, None)) is not None:
                raise error
        text = file.read_text() if file.exists() else ""
        if not text:
            raise ConfigError("file: expected text, got none")
        return text

    return ReloadedFiles("words", [file], read, clock, is_watched=False)


def test_a_changed_file_is_read_at_the_next_check_and_an_unchanged_one_never_again(file):
    clock, reads = FakeClock(), []
    words = make_reloaded(file, clock, reads)
    file.write_text("second")
    assert words.get() == "first"
    words.check()
    assert words.get() == "second"
    words.check()
    assert (words.get(), len(reads)) == ("second", 2)


def test_a_file_that_replaces_another_is_read(file):
    clock = FakeClock()
    words = make_reloaded(file, clock)
    other = file.with_name("other")
    other.write_text("other")
    other.replace(file)
    words.check()
    assert words.get() == "other"


def test_a_broken_or_missing_file_leaves_the_old_value_and_is_logged_once(file, caplog):
    caplog.set_level(logging.ERROR)
    clock = FakeClock()
    words = make_reloaded(file, clock)
    file.unlink()
    for _ in range(3):
        words.check()
        assert words.get() == "first"
    assert [record.getMessage() for record in caplog.records] == [
        "words: the changed files cannot be used, so the previous ones stay valid: file: expected text, got none"
    ]
    file.write_text("third")
    words.check()
    assert words.get() == "third"


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "secret"),
        PermissionError(13, "secret"),
        UnicodeDecodeError("utf-8", b"secret", 0, 1, "secret"),
        RecursionError("secret"),
        ValueError("secret"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_invalid_file_is_read_again_at_each_check_and_logged_once_per_change(file, caplog, error):
    clock, reads = FakeClock(), []
    words = make_reloaded(file, clock, reads, [error, error])
    file.write_text("the second")
    for expected in ("first", "first", "the second", "the second"):
        words.check()
        assert words.get() == expected
    assert len(reads) == 4
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        f"words: the changed files cannot be used, so the previous ones stay valid: {type(error).__name__}"
    ]


def test_another_invalid_change_is_logged_again(file, caplog):
    clock = FakeClock()
    words = make_reloaded(file, clock, [], [ValueError(), ValueError()])
    for text in ("the second", "another third"):
        file.write_text(text)
        words.check()
        assert words.get() == "first"
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2


def reloaded_pair(tmp_path, rotations):
    """Return a function that writes a pair of files, and one that returns their reloaded texts.

    Args:
        tmp_path: the folder of the files.
        rotations: texts that replace both files between the reads of the first and the second file, one for each time
            that the files are read; an empty text replaces nothing.
    """
    paths = [tmp_path / "certificate", tmp_path / "key"]
    remaining_rotations = iter(rotations)

    def write(text):
        for path in paths:
            path.write_text(text)

    def read():
        certificate = paths[0].read_text()
        if text := next(remaining_rotations, ""):
            write(text)
        key = paths[1].read_text()
        if certificate.startswith("refuses") and key != certificate:
            raise ConfigError("key: it does not belong to the certificate")
        return certificate, key

    return write, lambda: ReloadedFiles("pair", paths, read, is_watched=False)


def test_files_that_change_while_they_are_read_are_never_combined(tmp_path):
    write, reload = reloaded_pair(tmp_path, ["", "second"])
    write("1st")
    pair = reload()
    write("the first change")
    pair.check()
    assert pair.get() == ("1st", "1st")
    pair.check()
    assert pair.get() == ("second", "second")


@pytest.mark.parametrize("first", ["1st", "refuses another key"])
def test_files_that_change_while_they_are_first_read_are_read_again(tmp_path, first):
    write, reload = reloaded_pair(tmp_path, ["second", "the third"])
    write(first)
    assert reload().get() == ("the third", "the third")


def test_files_that_never_stop_changing_are_refused_at_start(tmp_path):
    write, reload = reloaded_pair(tmp_path, ["change" * length for length in range(1, 1000)])
    write("first")
    with pytest.raises(ConfigError, match="pair: the files change while they are read"):
        reload()


def test_a_file_that_is_broken_at_start_is_an_error(file):
    file.write_text("")
    with pytest.raises(ConfigError, match="expected text"):
        make_reloaded(file, FakeClock())


def test_a_thread_checks_the_files_until_nothing_uses_the_value(file, monkeypatch):
    monkeypatch.setattr(reloaded_files, "PERIOD_S", 0.01)
    started = started_threads()
    words = [ReloadedFiles("words", [file], file.read_text)]
    file.write_text("second")
    wait_until(lambda: words[0].get() == "second")
    assert len(started("radixkv-files")) == 1
    words.clear()
    gc.collect()
    wait_until(lambda: not started("radixkv-files"))


def test_while_a_file_blocks_the_old_value_stays_available_and_it_is_logged_once(file, monkeypatch, caplog):
    monkeypatch.setattr(reloaded_files, "PERIOD_S", 0.01)
    clock, is_blocked, may_go_on = FakeClock(), threading.Event(), threading.Event()

    def read():
        if file.read_text() == "blocks":
            is_blocked.set()
            assert may_go_on.wait(PATIENCE_S)
            return "third"
        return "first"

    words = ReloadedFiles("words", [file], read, clock)
    file.write_text("blocks")
    assert is_blocked.wait(PATIENCE_S)
    clock.now_s += 10
    assert words.get() == "first"
    assert not caplog.records
    clock.now_s += 1
    assert [words.get(), words.get()] == ["first"] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "words: the files could not be read for 10 s, so the previous ones stay valid; does their file system respond?"
    ]
    may_go_on.set()
    wait_until(lambda: words.get() == "third")


def test_a_fifo_in_place_of_a_file_is_refused_and_blocks_nothing(file, caplog):
    words = ReloadedFiles("words", [file], lambda: read_named("key", file).decode(), is_watched=False)
    file.unlink()
    os.mkfifo(file)
    words.check()
    assert words.get() == "first"
    assert "key: expected a readable file, got" in caplog.text
    assert "not a regular file but a FIFO" in caplog.text
