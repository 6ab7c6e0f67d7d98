"""Kernels are loaded from the installation or compiled once, never for another processor or from old sources."""

import _ctypes
import ctypes
import logging
import os
import stat
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from radixkv.kernels.native import library
from radixkv.kernels.native.compiler import NotCompiled, digest_of, library_name
from radixkv.kernels.native.library import load_library, runnable_variants
from radixkv.kernels.native.variants import VARIANTS, Variant

AMX, AVX512_BF16, AVX512, AVX2 = VARIANTS

# A compiler that appends its arguments to the file "calls", and copies an existing library, which can be loaded.
COMPILER = f"""#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
for argument; do [ "$last" = -o ] && cp {_ctypes.__file__} "$argument"; last="$argument"; done
exit 0
"""
MAKES_NO_LIBRARY = COMPILER.replace(f"cp {_ctypes.__file__}", "echo made >")


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kernels compiled at installation, which is empty. The processor is one with AVX-512."""
    monkeypatch.setattr(library, "_INSTALLED", tmp_path / "installed")
    monkeypatch.setattr(library, "runnable_variants", lambda: [AVX512, AVX2])
    (tmp_path / "installed").mkdir()
    return tmp_path / "installed"


def fake_compiler(folder: Path, text: str = COMPILER) -> dict[str, str]:
    """Write a script named g++ to a new folder. Returns an environment whose PATH begins with the folder."""
    folder.mkdir()
    file = folder / "g++"
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IEXEC)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def compiler_calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


def num_linked_libraries(folder: Path) -> int:
    return sum("-shared" in call and "trial" not in call for call in compiler_calls(folder))


def install(folder: Path, variant: Variant, digest: str) -> None:
    """Write a loadable library with a stamp, as an installation does. The loader ignores bytes after the ELF tables."""
    stamp = f"radixkv kernels {variant.name} {digest}"
    (folder / library_name(variant)).write_bytes(Path(_ctypes.__file__).read_bytes() + stamp.encode())


class TestWhatTheProcessorCanRun:
    @pytest.fixture(autouse=True)
    def restore_runnable_variants(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library, "runnable_variants", runnable_variants)

    @pytest.mark.parametrize(
        ("capability", "missing", "runnable"),
        [
            ("AMX", [], ["amx", "avx512_bf16", "avx512", "avx2"]),
            ("AVX512", [], ["avx512_bf16", "avx512", "avx2"]),  # ATEN_CPU_CAPABILITY, or Linux gives no tiles
            ("AMX", ["amx_bf16"], ["avx512_bf16", "avx512", "avx2"]),
            ("AVX512", ["avx512_bf16"], ["avx512", "avx2"]),
            *(("AVX512", [each], ["avx2"]) for each in ("avx512f", "avx512bw", "avx512dq", "avx512vl")),
            ("AVX2", [], ["avx2"]),
            *(("AVX2", [each], []) for each in ("avx2", "fma", "f16c")),
            ("DEFAULT", [], []),
            ("SVE256", [], []),
        ],
    )
    def test_a_variant_needs_all_its_features_and_what_torch_allows(
        self, capability: str, missing: list[str], runnable: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(library, "processor_capability", lambda: capability)
        monkeypatch.setattr(library, "processor_flags", lambda: set(AMX.features) - set(missing))
        assert [variant.name for variant in runnable_variants()] == runnable

    def test_other_processors_have_no_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library, "processor_flags", lambda: frozenset())
        with pytest.raises(NotCompiled, match="Linux on x86-64 processors with AVX2"):
            load_library(tmp_path, fake_compiler(tmp_path / "bin"))

    @pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
    def test_a_variant_is_compiled_with_its_features_only(self, variant: Variant, tmp_path: Path) -> None:
        load_library(tmp_path, fake_compiler(tmp_path / "bin"), variants=[variant])
        for call in compiler_calls(tmp_path / "bin"):
            if "-shared" not in call:
                options = [word for word in call.split() if word.startswith("-m")]
                assert options == ["-march=x86-64", "-mtune=generic", *variant.options]
                assert "-ffp-contract=off" in call
        assert [option[2:].replace("-", "_") for option in variant.options] == [
            feature.replace("512_", "512") for feature in variant.features
        ]


class TestInstalledKernels:
    def test_compiled_kernels_are_loaded_without_a_compiler(
        self, installed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        install(installed, AVX512, digest_of(AVX512))
        with caplog.at_level(logging.INFO):
            loaded = load_library(tmp_path / "cache", {"PATH": str(tmp_path)})
        file = installed / "kernels_avx512.so"
        assert loaded._name == str(file)
        assert caplog.messages == [f"using kernels for avx512: {file}"]
        assert not (tmp_path / "cache").exists()

    def test_outdated_kernels_are_not_used(self, installed: Path, tmp_path: Path) -> None:
        install(installed, AVX512, "0123456789abcdef")
        loaded = load_library(tmp_path / "cache", fake_compiler(tmp_path / "bin"))
        assert Path(loaded._name).parent == tmp_path / "cache" / "kernels"
        assert num_linked_libraries(tmp_path / "bin") == 1

    def test_kernels_of_another_variant_are_not_used_under_its_name(self, installed: Path, tmp_path: Path) -> None:
        install(installed, AVX2, digest_of(AVX2))
        (installed / library_name(AVX2)).rename(installed / library_name(AVX512))
        loaded = load_library(tmp_path / "cache", fake_compiler(tmp_path / "bin"))
        assert Path(loaded._name).parent == tmp_path / "cache" / "kernels"

    def test_kernels_that_can_not_be_loaded_are_compiled(self, installed: Path, tmp_path: Path) -> None:
        stamp = f"radixkv kernels avx512 {digest_of(AVX512)}"
        (installed / library_name(AVX512)).write_text(stamp)
        loaded = load_library(tmp_path / "cache", fake_compiler(tmp_path / "bin"))
        assert Path(loaded._name).parent == tmp_path / "cache" / "kernels"

    def test_slower_kernels_are_used_with_a_warning_if_better_ones_can_not_be_compiled(
        self, installed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        install(installed, AVX2, digest_of(AVX2))
        loaded = load_library(tmp_path / "cache", {"PATH": str(tmp_path)})
        assert loaded._name == str(installed / library_name(AVX2))
        (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert warning.startswith("using kernels for avx2, although the processor has faster ones: there is no g++")


class TestMissing:
    def test_without_a_compiler_the_error_names_what_is_missing(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with (
            caplog.at_level(logging.INFO),
            pytest.raises(NotCompiled, match=r"there is no g\+\+ or c\+\+; install GCC .*, or set CXX to it"),
        ):
            load_library(tmp_path, {"PATH": str(tmp_path)})
        assert caplog.messages == []  # above all, not that kernels are being compiled

    def test_a_configured_compiler_is_not_replaced_by_another(self, tmp_path: Path) -> None:
        with pytest.raises(NotCompiled, match="CXX names mycc, which does not exist"):
            load_library(tmp_path, {**fake_compiler(tmp_path / "bin"), "CXX": "mycc"})

    def test_a_compiler_may_have_arguments(self, tmp_path: Path) -> None:
        load_library(tmp_path, {**fake_compiler(tmp_path / "bin"), "CXX": "g++ -pipe"})
        assert all(call.startswith("-pipe ") for call in compiler_calls(tmp_path / "bin"))

    @pytest.mark.parametrize(
        ("output", "reported"),
        [
            ("echo no space left", "no space left"),
            ("echo 'a.cpp:1: error: no such option'; echo stopped.", "a.cpp:1: error: no such option"),
        ],
    )
    def test_the_error_of_a_failing_compiler_is_reported(self, output: str, reported: str, tmp_path: Path) -> None:
        failing = fake_compiler(tmp_path / "bin", f"#!/bin/sh\n{{ {output}; }} >&2\nexit 1\n")
        with pytest.raises(NotCompiled, match=rf"ended with status 1: {reported}$"):
            load_library(tmp_path / "cache", failing)
        assert list((tmp_path / "cache" / "kernels").glob("*.so")) == []

    def test_an_unwritable_folder_is_reported_with_the_remedy(self, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("a file")
        with pytest.raises(NotCompiled, match=r"cache/kernels can't hold .*; set XDG_CACHE_HOME to a directory"):
            load_library(tmp_path / "cache", fake_compiler(tmp_path / "bin"))

    def test_a_folder_mounted_noexec_is_detected_before_compiling(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A small file is compiled and loaded first. `ctypes.CDLL` fails as it does in a folder mounted noexec."""

        def load(name: str) -> None:
            raise OSError(f"{name}: failed to map segment from shared object")

        monkeypatch.setattr(ctypes, "CDLL", load)
        with pytest.raises(NotCompiled, match=r"failed to map segment .*; set XDG_CACHE_HOME to a directory .* noexec"):
            load_library(tmp_path / "cache", fake_compiler(tmp_path / "bin"), variants=[AVX512])
        inputs = [Path(call.split("-o ")[0].split()[-1]).name for call in compiler_calls(tmp_path / "bin")]
        assert inputs == ["stamp.cpp", "stamp.o"]

    def test_a_library_that_can_not_be_loaded_is_reported(self, tmp_path: Path) -> None:
        with pytest.raises(NotCompiled, match=r"\.so: .*(too short|invalid)"):
            load_library(tmp_path / "cache", fake_compiler(tmp_path / "bin", MAKES_NO_LIBRARY))


class TestCompiledOnce:
    def test_compilation_is_logged_before_and_after(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def run(command: list[str], **kwargs: object) -> object:
            compiled.append((Path(command[-3]).name, list(caplog.messages)))
            return true_run(command, **kwargs)

        compiled: list[tuple[str, list[str]]] = []
        true_run = subprocess.run
        monkeypatch.setattr(subprocess, "run", run)
        with caplog.at_level(logging.INFO):
            load_library(tmp_path / "cache", fake_compiler(tmp_path / "bin"))
        assert [each for each in compiled if "stamp" in each[0]] == [("stamp.cpp", []), ("stamp.o", [])]
        assert all(log == ["compiling kernels for avx512, 5 to 60 s; once"] for _, log in compiled[2:])
        assert len(compiled) > 5
        assert [record.levelname for record in caplog.records] == ["INFO"] * 3
        assert caplog.messages[1].startswith("compiled kernels for avx512 in ")
        assert caplog.messages[2].startswith(f"using kernels for avx512: {tmp_path}/cache/kernels/avx512-")

    def test_a_compiled_library_is_reused_without_a_compiler(self, tmp_path: Path) -> None:
        environment = fake_compiler(tmp_path / "bin")
        for each in (environment, environment, {"PATH": str(tmp_path)}):
            load_library(tmp_path / "cache", each)
        assert num_linked_libraries(tmp_path / "bin") == 1

    def test_changed_sources_give_another_library(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        environment = fake_compiler(tmp_path / "bin")
        for source in ("old", "new"):
            monkeypatch.setattr("radixkv.kernels.native.compiler.sources", lambda source=source: [source])
            load_library(tmp_path / "cache", environment)
        assert num_linked_libraries(tmp_path / "bin") == 2

    @pytest.mark.parametrize(
        "damage", [lambda _: b"", lambda whole: whole[: len(whole) // 2], lambda whole: whole + b"x"]
    )
    def test_a_damaged_library_is_compiled_again(
        self, damage: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A damaged library is never loaded: half a file would crash the process."""
        environment = fake_compiler(tmp_path / "bin")
        file = Path(load_library(tmp_path / "cache", environment)._name)
        undamaged = file.read_bytes()
        other_folder = tmp_path / "other" / "kernels"  # the library in the first one is mapped into this process
        other_folder.mkdir(parents=True)
        (other_folder / file.name).write_bytes(damage(undamaged))
        loaded: list[bytes] = []
        load = ctypes.CDLL

        def record_and_load(name: str) -> ctypes.CDLL:
            loaded.append(Path(name).read_bytes())
            return load(name)

        monkeypatch.setattr(ctypes, "CDLL", record_and_load)
        load_library(tmp_path / "other", environment)
        assert loaded == [undamaged] * 2, "the library of the trial, and that of the kernels"
        assert num_linked_libraries(tmp_path / "bin") == 2

    def test_concurrent_processes_compile_one_library(self, tmp_path: Path) -> None:
        environment = fake_compiler(tmp_path / "bin")
        with ThreadPoolExecutor(4) as pool:
            loaded = list(pool.map(lambda _: load_library(tmp_path / "cache", environment), range(4)))
        assert len(loaded) == 4
        assert num_linked_libraries(tmp_path / "bin") == 1

    def test_leftovers_of_an_interrupted_start_are_removed(self, tmp_path: Path) -> None:
        leftover = tmp_path / "cache" / "kernels" / "unfinished" / "tmp" / "rows.o"
        leftover.parent.mkdir(parents=True)
        leftover.write_text("half")
        load_library(tmp_path / "cache", fake_compiler(tmp_path / "bin"))
        assert sorted(path.suffix for path in (tmp_path / "cache" / "kernels").iterdir()) == ["", ".so"]

    def test_the_eight_most_recently_used_libraries_are_kept(self, tmp_path: Path) -> None:
        folder, environment = tmp_path / "cache" / "kernels", fake_compiler(tmp_path / "bin")
        folder.mkdir(parents=True)
        for number in range(10):
            (folder / f"avx2-{number}.so").write_text("old")
            os.utime(folder / f"avx2-{number}.so", (number, number))
        used = Path(load_library(tmp_path / "cache", environment)._name)
        os.utime(used, (0, 0))
        load_library(tmp_path / "cache", environment)  # the same library, which is now the most recently used
        load_library(tmp_path / "cache", environment, variants=[AVX2])
        names = {path.name for path in folder.glob("*.so")}
        assert used.name in names
        assert names >= {f"avx2-{number}.so" for number in range(4, 10)}
        assert len(names) == 8
