"""What kernels are compiled from is written in the library, and nothing is needed but Python and GCC."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from radixkv.kernels.native.compiler import NotCompiled, compile_kernels, digest_of, is_current, library_name
from radixkv.kernels.native.variants import VARIANTS, Variant

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_stamp_names_variant_and_sources(variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / library_name(variant)
    file.write_text(f"machine code, radixkv kernels {variant.name} {digest_of(variant)}, machine code")
    assert [each for each in VARIANTS if is_current(file, each)] == [variant]
    monkeypatch.setattr("radixkv.kernels.native.compiler.sources", lambda: ["other"])
    assert not is_current(file, variant)
    assert not is_current(tmp_path / "missing", variant)


def test_compiled_kernels_have_their_stamp(library: ctypes.CDLL) -> None:
    assert sum(is_current(Path(library._name), variant) for variant in VARIANTS) == 1


def test_threads_are_those_of_torch(library: ctypes.CDLL) -> None:
    """With an OpenMP of its own, the number of threads that torch sets would mean nothing."""
    num_threads = torch.get_num_threads()
    try:
        for expected in (1, 2):
            torch.set_num_threads(expected)
            assert library.radixkv_num_threads() == expected
    finally:
        torch.set_num_threads(num_threads)


def test_installation_needs_nothing_but_python() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import radixkv.kernels.native.compiler"
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_another_compiler_than_gcc_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(NotCompiled, match="the kernels need GCC: torch's OpenMP is GCC's"):
        compile_kernels(VARIANTS[-1], tmp_path / "kernels.so", {"CXX": "g++ -D__clang__"})
    assert list(tmp_path.iterdir()) == []
