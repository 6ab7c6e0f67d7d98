"""Runs `radixkv serve` in a forked process, for tests of what a server answers.

Tests of its startup run the command itself, which takes longer because it imports all modules.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.forked_process import ForkedProcess
from tests.patience import PATIENCE_S


@contextmanager
def serving(*arguments: str, log: Path = Path(os.devnull)) -> Iterator[tuple[ForkedProcess, str]]:
    """Run `radixkv serve` with its log in a file; yield the process and its address."""
    command = [sys.executable, "-m", "radixkv.service", "serve", "--port", "0", *arguments]
    with log.open("w", encoding="utf-8") as stderr, ForkedProcess(command, stderr=stderr) as process:
        try:
            line = process.stdout.readline()
            assert line.startswith("listening on "), line
            yield process, line.removeprefix("listening on ").strip()
        finally:
            process.terminate()
            process.wait(PATIENCE_S)
