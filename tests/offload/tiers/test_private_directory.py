from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from radixkv.errors import ConfigError
from radixkv.offload.tiers.disk import DiskStore
from radixkv.offload.tiers.private_directory import require_private

from .blocks import FORMAT, OBJECT_BYTES, block
from .disks import SLOT_BYTES


def disk(path: Path, *, must_be_private: bool = True) -> DiskStore:
    return DiskStore(path, FORMAT, OBJECT_BYTES, 9 * SLOT_BYTES, must_be_private=must_be_private)


def assert_refused(path: Path, culprit: Path, mode: int) -> None:
    """Assert that a path is refused because of the mode or the owner of `culprit`."""
    message = f"tiers.disk_path: expected a directory that only user {os.geteuid()} can write, got {culprit} of user"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)} .* with mode {mode:04o}; set tiers.secret_file"):
        require_private(path)


def test_the_directory_of_a_disk_tier_is_private(tmp_path: Path) -> None:
    store = disk(tmp_path / "disk")
    store.put([block(1)])
    store.close()
    require_private(tmp_path / "disk")
    require_private(store.path)
    disk(tmp_path / "disk").close()


def test_a_path_that_does_not_exist_is_not_refused() -> None:
    require_private(Path("/dev/null/below"))
    require_private(Path("/dev/shm/radixkv-does-not-exist"))


def test_a_parent_with_the_sticky_bit_is_accepted(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "own").mkdir(mode=0o700)
    require_private(tmp_path / "own")
    assert_refused(tmp_path, tmp_path, 0o1777)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o720])
def test_a_directory_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    assert_refused(shared, shared, mode)
    assert_refused(shared / "below", shared, mode)
    with pytest.raises(ConfigError, match=r"^tiers\.disk_path: expected a directory that only user"):
        disk(shared)
    disk(shared, must_be_private=False).close()


def test_a_link_to_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (tmp_path / "link").symlink_to(shared)
    assert_refused(tmp_path / "link", shared, 0o777)


@pytest.mark.parametrize("name", ["heads", "blocks", "index", "format.json", "namespaces"])
def test_a_file_that_others_can_write_is_refused(tmp_path: Path, name: str) -> None:
    store = disk(tmp_path)
    store.close()
    (store.path / name).chmod(0o666)
    assert_refused(store.path, store.path / name, 0o666)
    with pytest.raises(ConfigError, match=r"^tiers\.disk_path: expected a directory that only user"):
        disk(tmp_path)


def test_a_file_that_is_a_link_is_refused(tmp_path: Path) -> None:
    store = disk(tmp_path / "disk")
    store.close()
    (store.path / "blocks").rename(tmp_path / "moved")
    (store.path / "blocks").symlink_to(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"^tiers\.disk_path: expected a directory that only user"):
        disk(tmp_path / "disk")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    (tmp_path / "theirs" / "below").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 1234, -1)
    assert_refused(tmp_path / "theirs", tmp_path / "theirs", 0o700)
    assert_refused(tmp_path / "theirs" / "below", tmp_path / "theirs", 0o700)
