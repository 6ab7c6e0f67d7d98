from __future__ import annotations

import re
from pathlib import Path

import pytest

from radixkv.config.named_file import read_named
from radixkv.errors import ConfigError


def test_the_contents_of_the_file_are_returned(tmp_path: Path) -> None:
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
def test_an_unreadable_file_is_reported_with_its_key(path: str, got: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'server.tls_key: expected a readable file, got {got}')}$"):
        read_named("server.tls_key", path)
