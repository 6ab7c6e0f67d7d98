"""The rows of one stage of the product part: each is printed and written to the stage's file as soon as it is known."""

from __future__ import annotations

import argparse
import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.parts.result_file import write_json

_MAX_REASON_CHARACTERS = 500  # enough for the errors of `ProductServer`, which contain the end of a log


class StageReport:
    """The rows of a stage.

    Every row has a `name`, the flag `is_right`, and a `text` to print. A row that could not be measured has a `reason`,
    and other rows that are not right may have one. Rows with a target for speed also have `is_goal_met`; it is None in
    a dry run, whose times are meaningless.

    Args:
        file: the stage's result file; None to write no file.
        is_dry_run: whether the stage runs with small sizes on a CPU.
    """

    def __init__(self, file: Path | None, *, is_dry_run: bool) -> None:
        self.is_dry_run = is_dry_run
        self._file = file
        self._rows: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def row(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield a row to fill. An exception ends the `with` statement and becomes the `reason` of the row."""
        row: dict[str, Any] = {"name": name, "is_right": True, "text": ""}
        try:
            yield row
        except Exception as raised:  # noqa: BLE001 - whatever one row raises, the other rows are measured
            traceback.print_exc()
            first_line = str(raised).strip().partition("\n")[0]
            reason = f"{type(raised).__name__}: {first_line}"
            row |= {"is_right": False, "reason": reason[:_MAX_REASON_CHARACTERS]}
        self.add(row)

    def add(self, row: dict[str, Any]) -> None:
        """Print a complete row and write all rows so far."""
        self._rows.append(row)
        result = "ok" if row["is_right"] else "FAILED"
        missed = ", goal missed" if row.get("is_goal_met") is False else ""
        print(f"{result:<6} {row['name']}: {row.get('reason') or row['text']}{missed}", flush=True)
        self._write(is_finished=False, summary="")

    def goal(self, is_met: bool) -> bool | None:
        """Return whether a target for speed is met; None in a dry run."""
        return None if self.is_dry_run else is_met

    @property
    def is_right(self) -> bool:
        """Whether there are rows, and all of them are right."""
        return bool(self._rows) and all(row["is_right"] for row in self._rows)

    def finish(self, summary: str) -> int:
        """Write the result with one line for the table of all stages. Returns the exit status of the stage."""
        self._write(is_finished=True, summary=summary)
        return 0 if self.is_right else 1

    def _write(self, *, is_finished: bool, summary: str) -> None:
        if self._file is not None:
            write_json(self._file, {"rows": self._rows, "is_finished": is_finished, "summary": summary})


def open_report(description: str) -> StageReport:
    """Parse the command line that all stages share, and open the report of a stage."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--dry-run", action="store_true", help="small sizes and the embedded model on the CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    return StageReport(options.json, is_dry_run=options.dry_run)
