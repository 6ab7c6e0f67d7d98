from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from radixkv.config.regular_file import read_named, read_regular
from radixkv.errors import ConfigError


def test_a_file_and_the_target_of_a_link_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_regular(tmp_path / "link") == b"content" == read_regular(tmp_path / "file", max_bytes=7)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with pytest.raises(OSError, match="larger than 6 bytes"):
        read_regular(tmp_path / "file", max_bytes=6)


def test_a_path_that_is_not_a_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path / "link"):
        with pytest.raises(OSError, match="not a regular file but a FIFO"):
            read_regular(path)
    with pytest.raises(OSError, match="not a regular file but a device"):
        read_regular("/dev/zero")
    with pytest.raises(IsADirectoryError) as raised:
        read_regular(tmp_path)
    assert raised.value.filename == str(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="No such device or address"):
            read_regular(tmp_path / "socket")


def test_no_file_stays_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(b"content")
    num_open_before = len(os.listdir("/proc/self/fd"))
    assert read_regular(tmp_path / "file") == b"content"
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(OSError):
            read_regular(path)
    with pytest.raises(OSError, match="larger"):
        read_regular(tmp_path / "file", max_bytes=1)
    assert len(os.listdir("/proc/self/fd")) == num_open_before


def test_the_contents_of_a_named_file_are_returned(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\xff\n")
    assert read_named("server.tls_key", tmp_path / "a") == b"\xff\n"


@pytest.mark.parametrize(
    ("path", "got"),
    [
        ("certs/nowhere.pem", "certs/nowhere.pem: No such file or directory"),
        ("/dev", "/dev: Is a directory"),
        ("/dev/null/x", "/dev/null/x: Not a directory"),
        ("", "an empty path"),
        ("a\0b", "the invalid path 'a\\x00b'"),
    ],
)
def test_an_unreadable_named_file_is_reported_with_its_key(path: str, got: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'server.tls_key: expected a readable file, got {got}')}$"):
        read_named("server.tls_key", path)
