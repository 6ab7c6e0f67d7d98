"""Every mutant applies to today's code. `make mutants` would notice only when it gets there."""

from __future__ import annotations

import pytest

from tests.mutants.mutants import Mutant
from tests.mutants.mutation_check import CHECKS, path_of


@pytest.mark.parametrize(
    "mutant",
    [mutant for mutants, _ in CHECKS for mutant in mutants],
    ids=lambda mutant: f"{mutant.file}: {mutant.text.strip()}",
)
def test_every_mutant_applies(mutant: Mutant) -> None:
    source = path_of(mutant).read_text(encoding="utf-8")
    assert source.count(mutant.text) == 1
    assert mutant.replacement != mutant.text
