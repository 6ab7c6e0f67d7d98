"""One process of a run on a GPU: its command, its limit, and the modules and kernels that it needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Stage:
    """One process of the run. It is called with `--json FILE`, and rewrites this file after each row.

    Attributes:
        name: name of the stage.
        budget_s: seconds after which the process is killed.
        needs: modules without which the process is not started.
        command: arguments of `python`.
        dry_command: arguments of `python` for a small run on a CPU; None for `command` with `--dry-run`.
        takes_sglang: whether the command has the option `--sglang FOLDER`.
        tries_kernels: whether the rows of the stage report which attention kernels passed their trial.
        uses_passed_kernels: whether the stage uses only attention kernels that passed their trial.
        needs_kernels: attention kernels of which at least one must have passed; otherwise the stage is not started.
        is_optional: whether the run succeeds if this stage is not started, for example because a module is missing.
        servers: `start` for the stage that starts the servers of the part, `use` for a stage that needs them, and
            None for any other stage, before which the servers are stopped.
    """

    name: str
    budget_s: float
    needs: tuple[str, ...]
    command: str
    dry_command: str | None = None
    takes_sglang: bool = False
    tries_kernels: bool = False
    uses_passed_kernels: bool = False
    needs_kernels: tuple[str, ...] = ()
    is_optional: bool = False
    servers: Literal["start", "use"] | None = None


def missing_imports(names: Sequence[str]) -> list[str]:
    """Return the modules that are not found on this machine. A module that is found may still fail to import."""
    return [name for name in names if not _is_found(name)]


def _is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that contains the module is missing
        return False
