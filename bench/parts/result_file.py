"""Writes results as JSON files that are never partly written."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.parts.environment import describe_run


def write_result(path: Path | None, module: str, arguments: Sequence[str] | None, result: Mapping[str, Any]) -> None:
    """Write the result of a benchmark, with the description of the run.

    Args:
        path: the value of the option `--json`, whose folder is created if it is missing; None to write nothing.
        module, arguments: as for `describe_run`.
        result: the values that the benchmark has measured, and the options that they depend on.
    """
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {**result, **describe_run(module, arguments)})


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
