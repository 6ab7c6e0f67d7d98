from __future__ import annotations

import errno
from io import FileIO
from pathlib import Path

import pytest

from radixkv.namespace import Namespace
from radixkv.offload.tiers.namespace_file import NamespaceFile

ROOT = bytes(range(32))
ODD = Namespace("model", 'a"\n,\ud800', "digest", "  salt")


def read_names(path: Path) -> dict[bytes, Namespace]:
    names = NamespaceFile(path)
    names.close()
    return names.by_root()


def add(names: NamespaceFile, root: bytes, namespace: Namespace) -> None:
    names.add(root, namespace)
    names.write()


class BrokenFile:
    """A file on a disk that is full after `num_bytes`, and that takes at most seven bytes per write."""

    def __init__(self, file: FileIO, num_bytes: int) -> None:
        self._file = file
        self._num_left = num_bytes

    def write(self, data: memoryview) -> int:
        if not self._num_left:
            raise OSError(errno.ENOSPC, "No space left on device")
        chunk = data[: min(self._num_left, 7)]
        self._num_left -= len(chunk)
        return self._file.write(chunk)


def test_the_next_process_finds_the_names(tmp_path: Path) -> None:
    names = NamespaceFile(tmp_path / "names")
    add(names, ROOT, ODD)
    add(names, bytes(32), Namespace("model"))
    names.close()
    assert read_names(tmp_path / "names") == {ROOT: ODD, bytes(32): Namespace("model")}


def test_a_namespace_is_written_once(tmp_path: Path) -> None:
    for _ in range(2):
        names = NamespaceFile(tmp_path / "names")
        add(names, ROOT, ODD)
        add(names, ROOT, ODD)
        names.close()
    assert len((tmp_path / "names").read_bytes().splitlines()) == 1


@pytest.mark.parametrize(
    "foreign_line", [b"\xff\xfe", b"[]", b'["00"]', b'{"a": 1}', b'["zz", "m", "t", "a", "s"]', b"7"]
)
def test_invalid_lines_are_ignored(foreign_line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "names"
    names = NamespaceFile(path)
    add(names, ROOT, ODD)
    names.close()
    path.write_bytes(foreign_line + b"\n" + path.read_bytes() + foreign_line)
    names = NamespaceFile(path)
    assert names.by_root() == {ROOT: ODD}
    add(names, bytes(32), Namespace("model"))
    names.close()
    assert read_names(path) == {ROOT: ODD, bytes(32): Namespace("model")}


def test_every_truncation_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "names"
    names = NamespaceFile(path)
    add(names, ROOT, Namespace("model", "first"))
    add(names, bytes(32), Namespace("model", "second"))
    names.close()
    data = path.read_bytes()
    for end in range(len(data)):
        path.write_bytes(data[:end])
        assert set(read_names(path).values()) <= {
            Namespace("model", "first"),
            Namespace("model", "second"),
        }


def test_only_the_user_can_read_the_namespaces(tmp_path: Path) -> None:
    NamespaceFile(tmp_path / "names").close()
    assert (tmp_path / "names").stat().st_mode & 0o777 == 0o600


def test_lines_that_a_full_disk_did_not_take_are_written_later(tmp_path: Path) -> None:
    path = tmp_path / "names"
    names = NamespaceFile(path)
    add(names, bytes(32), Namespace("model", "first"))
    file, names._file = names._file, BrokenFile(names._file, 30)  # type: ignore[assignment]
    names.add(ROOT, ODD)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            names.write()
    names._file = file
    names.add(b"\x01" * 32, Namespace("model", "third"))
    names.write()
    names.close()
    assert read_names(path) == names.by_root()
    assert len(names.by_root()) == 3


def test_the_file_is_rewritten_when_most_lines_are_useless(tmp_path: Path) -> None:
    path = tmp_path / "names"
    roots = [bytes([number]) * 32 for number in range(10)]
    names = NamespaceFile(path)
    for root in roots[:9]:
        names.add(root, ODD)
    names.write()
    names.add(roots[9], ODD)
    names.keep(set(roots[4:9]))
    names.write()
    assert len(path.read_bytes().splitlines()) == 9, "less than half of the lines are useless"
    names.keep(set(roots[6:9]))
    assert len(names) == 3
    names.write()
    assert len(path.read_bytes().splitlines()) == 3
    assert path.stat().st_mode & 0o777 == 0o600
    add(names, roots[0], ODD)
    names.close()
    assert read_names(path).keys() == names.by_root().keys() == {roots[0], *roots[6:9]}


def test_duplicate_lines_of_earlier_processes_are_removed_too(tmp_path: Path) -> None:
    path = tmp_path / "names"
    names = NamespaceFile(path)
    add(names, ROOT, ODD)
    names.close()
    path.write_bytes(3 * path.read_bytes())
    names = NamespaceFile(path)
    names.write()
    names.close()
    assert len(path.read_bytes().splitlines()) == 1
    assert read_names(path) == {ROOT: ODD}


def test_a_disk_that_fails_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "names"
    names = NamespaceFile(path)
    add(names, ROOT, ODD)
    names.keep(set())
    names.add(bytes(32), Namespace("model"))
    names._num_useless = 2
    (tmp_path / "names.partial").mkdir()
    with pytest.raises(OSError, match="partial"):
        names.write()
    assert read_names(path) == {ROOT: ODD}
    (tmp_path / "names.partial").rmdir()
    names.write()
    names.close()
    assert read_names(path) == {bytes(32): Namespace("model")}


def test_a_file_that_cannot_be_replaced_is_extended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no descriptor is left")

    path = tmp_path / "names"
    names = NamespaceFile(path)
    add(names, ROOT, ODD)
    names._num_useless = 2
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="no descriptor is left"):
            names.write()
    names._num_useless = 0
    names.add(bytes(32), Namespace("model"))
    names.write()
    names.close()
    assert read_names(path) == {ROOT: ODD, bytes(32): Namespace("model")}
