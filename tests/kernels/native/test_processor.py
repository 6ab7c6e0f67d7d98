from __future__ import annotations

from pathlib import Path

import pytest
import torch

from radixkv.kernels.native.processor import processor_capability, processor_facts, processor_flags

X86 = """processor\t: {number}
model name\t: AMD EPYC
stepping\t: 1
cpu MHz\t\t: 244{number}.4
flags\t\t: fpu avx2
"""


def test_identical_processors_are_listed_once_without_changing_fields(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("\n".join(X86.format(number=number) for number in range(2)))
    assert processor_facts(tmp_path / "cpuinfo") == ["flags\t\t: fpu avx2", "model name\t: AMD EPYC", "stepping\t: 1"]


def test_arm_processors_are_described_by_their_features(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd bf16\n")
    assert processor_facts(tmp_path / "cpuinfo") == ["Features\t: fp asimd bf16"]


def test_other_systems_describe_no_processor(tmp_path: Path) -> None:
    assert processor_facts(tmp_path / "cpuinfo") == []


@pytest.mark.parametrize(
    ("cpuinfo", "flags"),
    [
        ("flags\t\t: fpu avx2 fma\n", {"fpu", "avx2", "fma"}),
        ("flags\t\t: fpu avx2 fma\nflags\t\t: fpu avx2\n", {"fpu", "avx2"}),  # cores of two kinds
        ("Features\t: fp asimd\n", set()),
        ("", set()),
    ],
)
def test_flags_are_those_that_all_processors_have(cpuinfo: str, flags: set[str], tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert processor_flags(tmp_path / "cpuinfo") == flags


def test_a_system_without_cpuinfo_has_no_flags(tmp_path: Path) -> None:
    assert processor_flags(tmp_path / "cpuinfo") == set()


@pytest.mark.parametrize(
    ("torch_says", "has_tiles", "expected"),
    [("AVX512", True, "AMX"), ("AVX512", False, "AVX512"), ("AVX2", True, "AVX2"), ("DEFAULT", False, "DEFAULT")],
)
def test_amx_tiles_require_avx512(
    torch_says: str, has_tiles: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: torch_says)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles)
    assert processor_capability() == expected
