from pathlib import Path

import pytest

from radixkv.namespace import Namespace
from radixkv.storage.tiers.namespace_names import NamespaceNames

ROOT = bytes(range(32))
ODD = Namespace("model", 'a"\n,\ud800', "digest", "  salt")


def names_in(path: Path) -> dict[bytes, Namespace]:
    names = NamespaceNames(path)
    names.close()
    return names.namespaces


def test_the_next_process_finds_the_names(tmp_path: Path) -> None:
    names = NamespaceNames(tmp_path / "names")
    names.add(ROOT, ODD)
    names.add(bytes(32), Namespace("model"))
    names.close()
    assert names_in(tmp_path / "names") == {ROOT: ODD, bytes(32): Namespace("model")}


def test_a_namespace_is_written_once(tmp_path: Path) -> None:
    for _ in range(2):
        names = NamespaceNames(tmp_path / "names")
        names.add(ROOT, ODD)
        names.add(ROOT, ODD)
        names.close()
    assert len((tmp_path / "names").read_bytes().splitlines()) == 1


@pytest.mark.parametrize("rubbish", [b"\xff\xfe", b"[]", b'["00"]', b'{"a": 1}', b'["zz", "m", "t", "a", "s"]', b"7"])
def test_a_line_that_is_not_ours_is_left_out(rubbish: bytes, tmp_path: Path) -> None:
    path = tmp_path / "names"
    names = NamespaceNames(path)
    names.add(ROOT, ODD)
    names.close()
    path.write_bytes(rubbish + b"\n" + path.read_bytes() + rubbish)
    names = NamespaceNames(path)
    assert names.namespaces == {ROOT: ODD}
    names.add(bytes(32), Namespace("model"))
    names.close()
    assert names_in(path) == {ROOT: ODD, bytes(32): Namespace("model")}


def test_every_cut_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "names"
    names = NamespaceNames(path)
    names.add(ROOT, Namespace("model", "first"))
    names.add(bytes(32), Namespace("model", "second"))
    names.close()
    data = path.read_bytes()
    for end in range(len(data)):
        path.write_bytes(data[:end])
        assert set(names_in(path).values()) <= {
            Namespace("model", "first"),
            Namespace("model", "second"),
        }


def test_only_this_user_reads_the_names(tmp_path: Path) -> None:
    NamespaceNames(tmp_path / "names").close()
    assert (tmp_path / "names").stat().st_mode & 0o777 == 0o600
