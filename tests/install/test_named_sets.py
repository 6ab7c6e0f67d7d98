import doctest
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from . import matrix
from . import named_sets as named_sets_module
from .checks import CHECKS
from .named_sets import ROOT, closure, named_sets, oldest, project, requirements, sets_in

_FOR_DEVELOPERS = {"dev", "all"}


def test_sets_are_found_in_all_kinds_of_files() -> None:
    assert sets_in("RUN pip install --no-cache-dir '.[engine,text]' && x") == {("engine", "text")}
    assert sets_in('pip install "$(echo /wheels/radixkv-*.whl)[engine]"') == {("engine",)}
    assert sets_in("EXTRAS_demo         := engine,plot\nEXTRAS_all := all") == {("engine", "plot"), ("all",)}
    assert sets_in("`.[ray]` and `.[text]`, `[engine]`") == {("ray",), ("text",)}


@pytest.mark.parametrize("file", ["README.md", "docs/deploy/Dockerfile", "docs/deploy/radixkv.service"])
def test_the_matrix_contains_the_sets_in_a_file(file: str) -> None:
    named = sets_in((ROOT / file).read_text(encoding="utf-8"))
    assert named
    assert named <= set(named_sets())


def test_every_extra_is_documented_and_checked() -> None:
    extras = set(project()["optional-dependencies"]) - {"dev"}
    assert extras == {extra for each in named_sets() for extra in each}
    assert set(CHECKS) == extras - _FOR_DEVELOPERS


def test_an_extra_includes_others() -> None:
    assert closure(["flashinfer"]) == {"flashinfer", "cuda", "engine"}
    assert {"torch", "numpy"} <= {each.partition(">")[0] for each in requirements(["cuda"])}


def test_every_requirement_has_a_lower_bound() -> None:
    assert oldest(requirements(project()["optional-dependencies"]))
    with pytest.raises(ValueError, match="numpy: a lower bound is required"):
        oldest(["numpy"])


@pytest.mark.parametrize("module", [named_sets_module, matrix])
def test_docstring_examples_are_correct(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def test_a_failing_set_fails_the_matrix_after_the_other_sets_ran(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class FakeEnvironment(matrix.Environment):
        """Runs no program. Installing redis fails, and checks with a server need the extra `engine`."""

        def __init__(self, folder: Path, wheel: Path, tools: Path) -> None:
            self.installed: list[str] = []

        def install(self, extras: Iterable[str], constraints: Iterable[str] = ()) -> None:
            self.installed = [*extras]
            if "redis" in self.installed:
                raise matrix.Failed("pip install '.[redis]': exit status 1\nno such version")

        def check(self, kind: str, extras: Iterable[str]) -> Iterable[str]:
            yield f"ok: {kind} {sorted(extras)}"
            if kind == "ENGINE" and "engine" not in self.installed:
                raise matrix.Failed("there is no engine")

        def versions(self) -> dict[str, str]:
            return {"numpy": "2.4"}

        def num_bytes(self) -> int:
            return 10**7

    wheel = tmp_path / "radixkv.whl"
    wheel.touch()
    monkeypatch.setattr(matrix, "Environment", FakeEnvironment)
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "build_wheel", lambda folder: wheel)
    monkeypatch.setattr(matrix, "check_wheel", lambda folder, wheel: None)
    monkeypatch.setattr(matrix, "provide_redis", lambda folder, tools: None)
    assert matrix.main(["", "redis", "events"]) == 1
    out = capsys.readouterr().out
    assert "no such version" in out
    plain, redis, events = out.splitlines()[-3:]  # the rows of the table
    assert plain.endswith("ok: NONE []")
    assert redis.endswith("FAILED: pip install '.[redis]': exit status 1")
    assert events.endswith("ok: NONE ['events']; ok: ENGINE ['events']")
    assert matrix.main([""]) == 0


def test_a_wheel_that_fails_a_check_fails_the_matrix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = tmp_path / "build" / "install-matrix" / "builder" / "bin"
    wheel = tmp_path / "radixkv.whl"
    wheel.touch()

    def build_wheel(folder: Path) -> Path:
        programs.mkdir(parents=True)
        for name, script in (("pip", "exit 0"), ("twine", "exit 0"), ("check-wheel-contents", "echo W004: $2; exit 1")):
            (programs / name).write_text(f"#!/bin/sh\n{script}\n")
            (programs / name).chmod(0o755)
        return wheel

    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "build_wheel", build_wheel)
    assert matrix.main([""]) == 1
    assert f"check-wheel-contents: exit status 1\nW004: {wheel}" in capsys.readouterr().out


def test_an_unknown_extra_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        matrix.main(["engin"])
    assert ended.value.code == 2
    assert "expected extras of pyproject.toml, got engin" in capsys.readouterr().err
