"""The directory below which callers may have adapters loaded."""

from __future__ import annotations

from pathlib import Path

from radixkv.errors import InvalidRequest, SwitchedOff

_MAX_PATH_CHARS = 4096
_EXPECTED = "path: expected a directory below the service's model.adapter_directory"


class AdapterDirectory:
    """Finds directories that callers name, and lets none of them lead out of its own.

    Symbolic links are followed before they are judged, those of the files in a directory as well. What lies outside is
    refused in the same words whether it exists or not.

    Args:
        root: the directory; empty to refuse every call.
        file_names: files in each directory that are read.
    """

    def __init__(self, root: str, file_names: tuple[str, ...]) -> None:
        self._root = root
        self._file_names = file_names

    def find(self, path: str) -> Path:
        """Return the directory that a caller names, by a path that has no symbolic links.

        Args:
            path: relative to the root, or absolute.

        Raises:
            SwitchedOff: there is no root.
            InvalidRequest: it is not below the root, or no directory.
        """
        if not self._root:
            raise SwitchedOff("LoadAdapter: switched off, since model.adapter_directory is empty")
        if not 0 < len(path) <= _MAX_PATH_CHARS:
            raise InvalidRequest(f"path: expected 1 to {_MAX_PATH_CHARS} characters, got {len(path)}")
        try:
            root = Path(self._root).resolve()
            directory = (root / path).resolve()
            reached = [directory, *((directory / name).resolve() for name in self._file_names)]
            is_directory = directory.is_dir()
        except (OSError, RuntimeError, ValueError) as error:  # a circle of links, a zero byte, a name that is too long
            raise InvalidRequest(f"{_EXPECTED}, got a path that can't be followed") from error
        if not all(each.is_relative_to(root) for each in reached):
            raise InvalidRequest(f"{_EXPECTED}, got a path that leads out of it")
        if not is_directory:
            raise InvalidRequest(f"{_EXPECTED}, got a path without one")
        return directory
