"""A library contains a digest of its sources, and compiling needs only Python and GCC."""

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from radixkv.kernels.native.compiler import digest_of, is_current, library_name
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


def test_installation_needs_nothing_but_python() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import radixkv.kernels.native.compiler"
    subprocess.run([sys.executable, "-I", "-S", "-c", program], check=True)
