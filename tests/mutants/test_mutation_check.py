"""Every mutant applies to today's code. `make mutants` would notice only when it gets there."""

from __future__ import annotations

import pytest

from tests.mutants.mutants import CACHE_MUTANTS, ENGINE_MUTANTS, Mutant
from tests.mutants.mutation_check import ROOT


@pytest.mark.parametrize(
    "mutant", [*CACHE_MUTANTS, *ENGINE_MUTANTS], ids=lambda mutant: f"{mutant.file}: {mutant.text.strip()}"
)
def test_every_mutant_applies(mutant: Mutant) -> None:
    source = (ROOT / "radixkv" / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.text) == 1
    assert mutant.replacement != mutant.text
