"""Paths that callers name never lead out of the directory of adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from radixkv.engine.adapters.adapter_directory import AdapterDirectory
from radixkv.errors import InvalidRequest, SwitchedOff

FILES = ("adapter_config.json", "adapter_model.safetensors")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with two adapters, next to a directory with an adapter outside of it."""
    for place in ("root/law", "root/team/tax", "outside"):
        directory = tmp_path / place
        directory.mkdir(parents=True)
        for name in FILES:
            (directory / name).write_text("{}")
    return tmp_path / "root"


def test_a_directory_below_is_found_by_either_path(root: Path) -> None:
    directory = AdapterDirectory(str(root), FILES)
    assert directory.find("law") == directory.find(str(root / "law")) == root / "law"
    assert directory.find("team/../team/tax/.") == root / "team" / "tax"


@pytest.mark.parametrize(
    "path", ["../outside", "..", "/", "/etc", "law/../../outside", "../missing", "../root2", "linked", "far"]
)
def test_paths_outside_are_refused_whether_they_exist_or_not(root: Path, path: str) -> None:
    (root / "linked").symlink_to(root.parent / "outside")
    (root / "far").symlink_to("/etc")
    with pytest.raises(InvalidRequest, match="got a path that leads out of it") as refused:
        AdapterDirectory(str(root), FILES).find(path)
    assert "outside" not in str(refused.value)


def test_a_file_that_is_a_link_to_the_outside_is_refused(root: Path) -> None:
    (root / "law" / FILES[1]).unlink()
    (root / "law" / FILES[1]).symlink_to(root.parent / "outside" / FILES[1])
    with pytest.raises(InvalidRequest, match="leads out of it"):
        AdapterDirectory(str(root), FILES).find("law")


def test_links_that_stay_inside_are_followed(root: Path) -> None:
    (root / "current").symlink_to("law")
    (root / "law" / FILES[1]).unlink()
    (root / "law" / FILES[1]).symlink_to(root / "team" / "tax" / FILES[1])
    assert AdapterDirectory(str(root), FILES).find("current") == root / "law"


def test_a_root_that_is_a_link_is_followed(root: Path) -> None:
    (root.parent / "link").symlink_to(root)
    assert AdapterDirectory(str(root.parent / "link"), FILES).find("law") == root / "law"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "path: expected 1 to 4096 characters, got 0"),
        ("x" * 4097, "path: expected 1 to 4096 characters, got 4097"),
        ("x" * 4000, "that can't be followed"),
        ("law\0x", "that can't be followed"),
        ("missing", "got a path that is not a directory"),
        ("law/adapter_config.json", "got a path that is not a directory"),
        ("circle", "path"),
    ],
    ids=["empty", "long", "long name", "zero byte", "missing", "file", "circle"],
)
def test_a_path_that_is_not_a_directory_is_refused(root: Path, path: str, message: str) -> None:
    (root / "circle").symlink_to("circle")
    with pytest.raises(InvalidRequest, match=message):
        AdapterDirectory(str(root), FILES).find(path)


def test_without_a_root_every_path_is_refused(root: Path) -> None:
    with pytest.raises(SwitchedOff, match="switched off"):
        AdapterDirectory("", FILES).find(str(root / "law"))
