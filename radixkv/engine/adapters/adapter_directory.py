"""The directory from which callers may load adapters."""

from __future__ import annotations

from pathlib import Path

from radixkv.errors import InvalidRequest, SwitchedOff

_MAX_PATH_CHARS = 4096
_EXPECTED = "path: expected a directory below the service's model.adapter_directory"


class AdapterDirectory:
    """Resolves paths that callers send, and refuses those that lead out of the directory.

    Symbolic links are resolved before a path is checked, including those of the files in a directory. A path outside
    the directory is refused with the same message whether it exists or not.

    Args:
        root: the directory; empty to refuse every call.
        file_names: files that are read in each directory below it.
    """

    def __init__(self, root: str, file_names: tuple[str, ...]) -> None:
        self._root = root
        self._file_names = file_names

    def find(self, path: str) -> Path:
        """Return the directory of a caller's path, with symbolic links resolved.

        Args:
            path: relative to the root, or absolute.

        Raises:
            SwitchedOff: there is no root.
            InvalidRequest: the path is empty, too long, can't be followed, leads out of the root, or is no directory.
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
        except (OSError, RuntimeError, ValueError) as error:  # a cycle of links, a zero byte, a name that is too long
            raise InvalidRequest(f"{_EXPECTED}, got a path that can't be followed") from error
        if not all(each.is_relative_to(root) for each in reached):
            raise InvalidRequest(f"{_EXPECTED}, got a path that leads out of it")
        if not is_directory:
            raise InvalidRequest(f"{_EXPECTED}, got a path that is not a directory")
        return directory
