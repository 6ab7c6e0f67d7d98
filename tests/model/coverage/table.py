"""Writes docs/MODELS.md: which causal models are served, as trials of small random checkpoints find out.

python -m tests.model.coverage.table > docs/MODELS.md
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path

import transformers
from transformers.utils import logging

from tests.model.coverage.coverage import Coverage, cover
from tests.model.coverage.small_configs import covered_types

FILE = Path(__file__).parents[3] / "docs" / "MODELS.md"

_HEAD = """# Models

{served} of {all} types of causal models are served. Counted are those for text that transformers {version} has and that
vLLM or SGLang serve, too (their registries in November 2026), without types that also take images or sound.

A test made this table (`python -m tests.model.coverage.table > docs/MODELS.md`): a random checkpoint of three layers of
each type, with a layer of each kind that the type has, is loaded in exact and in fast mode on a CPU. Its logits must be
those of transformers' eager attention in float32: cold, warm, from the middle of a block, in chunks and in a batch; in
exact mode with the same bits. A type that is not served is refused at start, by name and reason.

`radixkv serve` tries the same with the real weights before it listens. Types outside this table are served if their
attention goes through transformers' attention interface and the trial at start passes.
"""


def version() -> str:
    """The version of transformers that the table is of."""
    return ".".join(transformers.__version__.split(".")[:2])


def page(rows: Iterable[Coverage]) -> str:
    """Return docs/MODELS.md for these rows."""
    rows = sorted(rows, key=lambda row: row.model_type)
    served = [row for row in rows if row.refusal is None]
    head = _HEAD.format(served=len(served), all=len(rows), version=version())
    lines = [
        head,
        "## Served",
        "",
        "| model type | vLLM | SGLang | attention |",
        "|---|---|---|---|",
        *(f"{_start(row)} {row.attention} |" for row in served),
        "",
        "## Refused",
        "",
        "| model type | vLLM | SGLang | reason |",
        "|---|---|---|---|",
        *(f"{_start(row)} {row.refusal} |" for row in rows if row.refusal is not None),
    ]
    return "\n".join(lines) + "\n"


def line_of(row: Coverage) -> str:
    """Return the line of the page for one row."""
    return f"{_start(row)} {row.attention if row.refusal is None else row.refusal} |"


def _start(row: Coverage) -> str:
    marks = " | ".join("yes" if engine in row.engines else "" for engine in ("vLLM", "SGLang"))
    return f"| `{row.model_type}` | {marks} |"


def main() -> None:
    """Try all types, and print the page."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    rows = []
    for model_type in covered_types():
        with tempfile.TemporaryDirectory() as directory:
            rows.append(cover(model_type, Path(directory)))
        print(f"{model_type}: {rows[-1].refusal or 'served'}", file=sys.stderr)
    print(page(rows), end="")


if __name__ == "__main__":
    main()
