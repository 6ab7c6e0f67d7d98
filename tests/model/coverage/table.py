"""Generates docs/MODELS.md: which causal models are served, according to checks of small random checkpoints.

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

{served} of {all} types of causal models are served. The tables list the text-only types of transformers {version} that
vLLM or SGLang serves, according to their registries in November 2026.

This page is generated (`python -m tests.model.coverage.table > docs/MODELS.md`). For each type, the program loads a
random checkpoint, usually with three layers, in exact and in fast mode on a CPU. The logits must agree with
transformers' eager attention in float32: cold, with a cache hit, with a hit that ends inside a block (not with short
convolutions), in chunks and in a batch. In exact mode, the logits of one prompt must be bitwise identical cold, with a
hit at the end of a block, in chunks and in a batch. Types that are not served are refused at startup, with the reason.

Before `radixkv serve` listens, it compares the model, with its real weights, with transformers' eager attention. Types
outside this table are served if they use transformers' attention interface and pass this check.

`--model` also takes a GGUF file of the architectures llama (which includes Mistral's models), qwen2, qwen3, gemma2,
gemma3 and phi3, and the name of a model in the local cache of Hugging Face: see
[radixkv/model_files](../radixkv/model_files/README.md).
"""


def version() -> str:
    """Return the version of transformers, as MAJOR.MINOR."""
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
    """Return the line of the page for a row."""
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
