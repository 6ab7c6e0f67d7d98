"""The library is made once for sources, compiler and processor, and whatever is missing is told."""

import _ctypes
import ctypes
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from radixkv.kernels.native import library
from radixkv.kernels.native.library import NotCompiled, load_library

# A compiler that writes down what it is asked for, and makes what another one made: something that can be loaded.
COMPILER = f"""#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
for argument; do [ "$last" = -o ] && cp {_ctypes.__file__} "$argument"; last="$argument"; done
exit 0
"""
MAKES_NO_LIBRARY = COMPILER.replace(f"cp {_ctypes.__file__}", "echo made >")


@pytest.fixture(autouse=True)
def has_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "processor_capability", lambda: "AVX512")


def compiler(folder: Path, text: str = COMPILER) -> dict[str, str]:
    folder.mkdir()
    file = folder / "c++"
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IEXEC)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_a_machine_without_a_compiler_is_told_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(NotCompiled, match=r"it needs GCC, and there is no c\+\+ or g\+\+"):
        load_library(tmp_path, {"PATH": str(tmp_path)})


def test_a_compiler_that_was_asked_for_is_not_replaced_by_another(tmp_path: Path) -> None:
    with pytest.raises(NotCompiled, match="there is no mycc"):
        load_library(tmp_path, {**compiler(tmp_path / "bin"), "CXX": "mycc"})


def test_other_processors_have_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "processor_capability", lambda: "DEFAULT")
    with pytest.raises(NotCompiled, match="AVX2"):
        load_library(tmp_path)


def test_the_last_line_of_a_failing_compiler_is_told(tmp_path: Path) -> None:
    failing = compiler(tmp_path / "bin", '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no space left >&2\nexit 1\n')
    with pytest.raises(NotCompiled, match=r"ended with status 1: no space left$"):
        load_library(tmp_path / "kept", failing)
    assert list((tmp_path / "kept").iterdir()) == []


def num_made(folder: Path) -> int:
    return sum("-shared" in call for call in (folder / "calls").read_text().splitlines())


def test_what_was_made_is_not_made_again(tmp_path: Path) -> None:
    environment = compiler(tmp_path / "bin")
    for _ in range(2):
        load_library(tmp_path / "kept", environment)
    assert num_made(tmp_path / "bin") == 1
    calls = (tmp_path / "bin" / "calls").read_text().splitlines()
    assert all("-ffp-contract=off" in call for call in calls if " -c " in f" {call} ")


def test_vectors_are_as_wide_as_torch_says(tmp_path: Path) -> None:
    environment = compiler(tmp_path / "bin")
    for capability in ("AMX", "AVX512", "AVX2"):
        load_library(tmp_path / "kept", environment, capability=capability)
    assert len(list((tmp_path / "kept").iterdir())) == 3
    compiled = [call for call in (tmp_path / "bin" / "calls").read_text().splitlines() if "-march=native" in call]
    assert 3 * sum("-mno-avx512f" in call for call in compiled) == len(compiled) > 0
    assert 3 * sum("-mno-amx-bf16" in call for call in compiled) == 2 * len(compiled)


@pytest.mark.parametrize("damage", [lambda _: b"", lambda whole: whole[: len(whole) // 2], lambda whole: whole + b"x"])
def test_a_damaged_library_is_not_loaded_but_made_again(
    damage: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a file would end the process."""
    environment = compiler(tmp_path / "bin")
    load_library(tmp_path / "kept", environment)
    (file,) = (tmp_path / "kept").iterdir()
    whole, other = file.read_bytes(), tmp_path / "other"  # the first one is mapped into this process
    other.mkdir()
    (other / file.name).write_bytes(damage(whole))
    loaded = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: loaded.append(Path(name).read_bytes()))
    load_library(other, environment)
    assert loaded == [whole]
    assert num_made(tmp_path / "bin") == 2


def test_a_library_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, synced = tmp_path / "kept", []

    def sync(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").readlink(), len(list(kept.glob("*.so")))))

    monkeypatch.setattr(os, "fsync", sync)
    load_library(kept, compiler(tmp_path / "bin"))
    (library, num_before), (folder, num_after) = synced
    assert (library.suffix, num_before, folder, num_after) == (".so", 0, kept, 1)


def test_what_can_not_be_loaded_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotCompiled, match=r"native-[0-9a-f]{16}-[0-9a-f]{16}\.so: .*(too short|invalid)"):
        load_library(tmp_path / "kept", compiler(tmp_path / "bin", MAKES_NO_LIBRARY))


def test_another_compiler_makes_another_library(tmp_path: Path) -> None:
    for version in ("1", "2"):
        load_library(tmp_path / "kept", compiler(tmp_path / version, COMPILER.replace("exit 0", f"echo {version}")))
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_a_folder_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file")
    with pytest.raises(NotCompiled, match="kept"):
        load_library(tmp_path / "kept", compiler(tmp_path / "bin"))


def test_processes_that_make_it_at_once_leave_one(tmp_path: Path) -> None:
    environment = compiler(tmp_path / "bin")
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: load_library(tmp_path / "kept", environment), range(4)))
    assert len(loaded) == 4
    assert len(list((tmp_path / "kept").iterdir())) == 1
