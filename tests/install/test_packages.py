"""The package can be built and imported as a wheel, as a wheel of an sdist, and as an editable installation."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from radixkv.kernels.native.compiler import digest_of, library_name
from radixkv.kernels.native.variants import VARIANTS

ROOT = Path(__file__).parents[2]
PACKAGED = ("radixkv", "kernels", "service", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
LIBRARIES = {f"radixkv/kernels/native/{library_name(variant)}" for variant in VARIANTS}
# A fake compiler: compiling writes the arguments to the output file, and linking concatenates the input files.
COMPILER = """#!/bin/sh
for argument; do
  [ "$last" = -o ] && target="$argument"; last="$argument"
  case "$argument" in *.o) objects="$objects $argument" ;; esac
done
case "$*" in
  *-shared*) cat $objects > "$target" ;;
  *) echo "$@" > "$target" ;;
esac
"""

on_linux_x86_64 = pytest.mark.skipif(
    sysconfig.get_platform() != "linux-x86_64", reason="kernels are compiled for Linux on x86-64 only"
)


def build(hook: str, source: Path, target: Path, environment: dict[str, str]) -> Path:
    """Call a hook of the build backend, as `pip` and `build` do, and return the path of the result."""
    target.mkdir()
    program = f"from setuptools import build_meta; print(build_meta.{hook}({str(target)!r}))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=source, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return target / result.stdout.splitlines()[-1]


def clean_environment(**variables: str) -> dict[str, str]:
    """Return the environment variables of this process without those that change a build, and with others."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CXX")} | variables


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of everything that these tests build."""
    return tmp_path_factory.mktemp("packages")


@pytest.fixture(scope="module")
def checkout(folder: Path) -> Path:
    """A copy of the files of the repository that are packaged."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in PACKAGED:
        source, target = ROOT / name, folder / "checkout" / name
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=ignored)
        else:
            shutil.copy(source, target)
    return folder / "checkout"


@pytest.fixture(scope="module")
def with_compiler(folder: Path) -> dict[str, str]:
    """Environment variables with the fake compiler."""
    file = folder / "c++"
    file.write_text(COMPILER)
    file.chmod(0o755)
    return clean_environment(CXX=str(file))


@pytest.fixture(scope="module")
def wheel(checkout: Path, folder: Path, with_compiler: dict[str, str]) -> Path:
    """The wheel that `pip install .` builds if there is a compiler."""
    return build("build_wheel", checkout, folder / "wheel", with_compiler)


@pytest.fixture(scope="module")
def wheel_of_sdist(checkout: Path, folder: Path) -> Path:
    """The wheel that is built from an sdist if there is no compiler."""
    sdist = build("build_sdist", checkout, folder / "sdist", clean_environment())
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return build("build_wheel", source, folder / "wheel of sdist", clean_environment(CXX=str(folder / "none")))


@pytest.fixture(scope="module")
def editable(checkout: Path, folder: Path, with_compiler: dict[str, str]) -> Path:
    """The wheel of an editable installation, `pip install -e .`, if there is a compiler."""
    return build("build_editable", checkout, folder / "editable", with_compiler)


@pytest.fixture(scope="module", params=["wheel", "wheel_of_sdist", "editable"])
def python(request: pytest.FixtureRequest, folder: Path) -> Path:
    """An interpreter of an environment that contains radixkv and its dependencies."""
    package, environment = request.getfixturevalue(request.param), folder / f"{request.param} environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(package) as archive:
        archive.extractall(site_packages)
    # The dependencies are those of this interpreter.
    (site_packages / "needs.pth").write_text(sysconfig.get_path("purelib"))
    return environment / "bin" / "python"


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def imports_of_the_readme() -> str:
    """The import statements in all Python snippets of README.md."""
    snippets = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    nodes = [node for snippet in snippets for node in ast.parse(snippet).body]
    return "\n".join(ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def output_of(python: Path | str, program: str, folder: Path) -> str:
    """Return what a program prints. It runs in `folder`, which is then the first entry of `sys.path`."""
    result = subprocess.run(
        [python, "-c", program], cwd=folder, env=clean_environment(), check=True, stdout=subprocess.PIPE, text=True
    )
    return result.stdout


def test_the_imports_of_the_readme_work_inside_the_checkout(python: Path, checkout: Path) -> None:
    statements = imports_of_the_readme()
    assert "radixkv" in statements
    output = output_of(python, f"{statements}\nimport radixkv\nprint(radixkv.__file__)", checkout)
    assert str(checkout.parent) in output  # not the checkout that runs this test


def test_imports_and_commands_work_outside_the_checkout(python: Path, checkout: Path, tmp_path: Path) -> None:
    program = f"""{imports_of_the_readme()}
import contextlib, runpy, sys
sys.argv = ["radixkv", "--version"]
for module in ("radixkv", "radixkv.service"):
    with contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
import radixkv
print(radixkv.__file__)"""
    *versions, file = output_of(python, program, tmp_path).splitlines()
    assert len(versions) == 2
    assert all(version.startswith("radixkv 0.") for version in versions)
    assert str(checkout.parent) in file


@pytest.mark.slow
def test_type_checkers_find_the_types(python: Path, tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(
        "from radixkv.service.client import Client\n"
        "reveal_type(Client('127.0.0.1:1').prefill([1]).usage.cached_tokens)\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", python, "--cache-dir", tmp_path / "cache", "user.py"],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert re.search(r'Revealed type is "(builtins\.)?int"', result.stdout)
    assert result.stdout.endswith("Success: no issues found in 1 source file\n")


def test_a_wheel_has_one_top_level_package(wheel: Path, wheel_of_sdist: Path) -> None:
    for each in (wheel, wheel_of_sdist):
        top_level_names = {name.partition("/")[0] for name in names_in(each)}
        assert {name for name in top_level_names if not name.endswith(".dist-info")} == {"radixkv"}


def test_a_wheel_of_an_sdist_has_the_same_files(wheel: Path, wheel_of_sdist: Path) -> None:
    assert names_in(wheel) - LIBRARIES == names_in(wheel_of_sdist) - LIBRARIES
    assert "radixkv/py.typed" in names_in(wheel)


def test_an_editable_installation_adds_a_path(editable: Path, checkout: Path) -> None:
    """Type checkers support paths, but not import hooks."""
    (file,) = (name for name in names_in(editable) if name.endswith(".pth"))
    assert Path(zipfile.ZipFile(editable).read(file).decode().strip()) == checkout


def test_the_description_has_no_links_to_files_of_the_checkout(wheel: Path) -> None:
    (metadata,) = (name for name in names_in(wheel) if name.endswith(".dist-info/METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert "\n# radixkv\n" in text
    assert [target for target in re.findall(r"\]\(([^)]*)\)", text) if not target.startswith("http")] == []


@on_linux_x86_64
def test_a_wheel_contains_kernels_for_every_python_version(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    assert names_in(wheel) >= LIBRARIES
    for variant in VARIANTS:
        content = zipfile.ZipFile(wheel).read(f"radixkv/kernels/native/{library_name(variant)}").decode()
        assert f"radixkv kernels {variant.name} {digest_of(variant)}" in content
        assert all(option in content.split() for option in variant.options)


@on_linux_x86_64
def test_an_editable_installation_compiles_into_the_checkout(editable: Path, checkout: Path) -> None:
    assert {f"radixkv/kernels/native/{path.name}" for path in checkout.glob("kernels/native/*.so")} == LIBRARIES


def test_without_a_compiler_the_installation_has_no_kernels(wheel_of_sdist: Path) -> None:
    assert not [name for name in names_in(wheel_of_sdist) if name.endswith(".so")]


def test_other_platforms_have_a_pure_wheel(checkout: Path) -> None:
    platforms = [("Darwin", "arm64"), ("Darwin", "x86_64"), ("Linux", "aarch64")]
    program = f"""
import platform, setuptools
from distutils.core import run_setup
for system, machine in {platforms}:
    platform.system, platform.machine = lambda: system, lambda: machine
    command = run_setup("setup.py", stop_after="init").get_command_obj("bdist_wheel")
    command.ensure_finalized()
    print("tag", *command.get_tag())"""
    lines = output_of(sys.executable, program, checkout).splitlines()
    assert [line for line in lines if line.startswith("tag ")] == len(platforms) * ["tag py3 none any"]
