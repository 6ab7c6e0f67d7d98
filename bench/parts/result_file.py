"""Writes results as JSON files that are never partly written."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result atomically: a reader finds the old file or the complete new one."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2, allow_nan=False)
            file.write("\n")
        umask = os.umask(0)  # the umask can be read only by setting it
        os.umask(umask)
        Path(partial).chmod(0o666 & ~umask)  # mkstemp lets only the owner read it
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
