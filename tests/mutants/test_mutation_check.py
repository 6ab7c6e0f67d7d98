"""Every mutant applies to today's code. `make mutants` would notice only when it gets there."""

from __future__ import annotations

import pytest

from tests.mutants.mutants import Mutant
from tests.mutants.mutation_check import CHECKS, ROOT, path_of


@pytest.mark.parametrize(
    "mutant",
    [mutant for mutants, _ in CHECKS for mutant in mutants],
    ids=lambda mutant: f"{mutant.file}: {mutant.text.strip()}",
)
def test_every_mutant_applies(mutant: Mutant) -> None:
    source = path_of(mutant).read_text(encoding="utf-8")
    assert source.count(mutant.text) == 1
    assert mutant.replacement != mutant.text


def test_the_tests_that_should_notice_are_there() -> None:
    assert [test for _, tests in CHECKS for test in tests if not (ROOT / test).exists()] == []
