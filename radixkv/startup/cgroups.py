"""The Linux control groups (cgroups) that limit this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class CgroupFolder(NamedTuple):
    """The folder of a cgroup in the file system. It may not exist.

    Attributes:
        path: path of the folder.
        is_version_2: whether its files are those of cgroup version 2.
    """

    path: Path
    is_version_2: bool


def cgroup_folders(controller: str, system: Path) -> Iterator[CgroupFolder]:
    """Yield the folders of the process's cgroup and of the cgroups above it, up to the root.

    A container often sees its own cgroup at the root, whatever `/proc/self/cgroup` says, so the root is always among
    them.

    Args:
        controller: `cpu` or `memory`.
        system: root of the file system with `/proc` and `/sys`.
    """
    try:
        lines = (system / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = ["0::/"]
    root = system / "sys/fs/cgroup"
    for line in lines:  # ID:CONTROLLERS:PATH; version 2 of cgroups has no controllers here
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        hierarchies = [root / controllers, root / controller] if controllers else [root]
        cgroup = Path(path.lstrip("/"))
        for hierarchy in hierarchies:
            for folder in (cgroup, *cgroup.parents):
                yield CgroupFolder(hierarchy / folder, is_version_2=not controllers)
