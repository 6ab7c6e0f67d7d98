"""Every mutant applies to today's code. `make mutants` would notice only when it gets there."""

from __future__ import annotations

from tests.mutants.mutation_check import CHECKS, ROOT, path_of


def test_every_mutant_applies() -> None:
    mutants = [mutant for mutants, _ in CHECKS for mutant in mutants]
    sources = {mutant.file: path_of(mutant).read_text(encoding="utf-8") for mutant in mutants}
    counted = {f"{each.file}: {each.text.strip()}": sources[each.file].count(each.text) for each in mutants}
    assert {text: count for text, count in counted.items() if count != 1} == {}
    assert [each for each in mutants if each.replacement == each.text] == []


def test_the_tests_that_should_notice_are_there() -> None:
    assert [test for _, tests in CHECKS for test in tests if not (ROOT / test).exists()] == []
