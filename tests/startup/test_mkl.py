"""MKL's summation order, for fake descriptions of processors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from radixkv.startup.mkl import fix_summation_order
from tests.patience import PATIENCE_S

# Checks attention as PyTorch computes it on a processor with AVX2 but without AVX-512: by MKL, and not by oneDNN.
CHECK_ATTENTION = """
import os
import sys
from pathlib import Path
import torch
from radixkv.startup.mkl import fix_summation_order
fix_summation_order(os.environ, Path(sys.argv[1]))
torch._C._set_mkldnn_enabled(False)
from radixkv.model.attention.interface import AttentionKind, AttentionUse
from radixkv.model.attention.torch_kernels import TorchKernels
from radixkv.startup.attention_check import check_attention
from radixkv.storage.device_pool import KVShape
shape = KVShape(1, 1, 256, torch.bfloat16)  # a layer of Gemma 3 270M
use = AttentionUse((AttentionKind(4, 512, None),), torch.bfloat16, shape, 64, torch.device("cpu"), is_exact=True)
check_attention(TorchKernels(), use)
"""


def write_cpuinfo(tmp_path: Path, flags: str) -> Path:
    """Write a description of a processor with these features, as in /proc/cpuinfo."""
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor : 0\nmodel name : made up\nflags : {flags}\n")
    return file


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("sse avx2 fma", {"MKL_CBWR": "AVX2,STRICT"}), ("avx2 avx512f", {}), ("sse4_2", {})],
)
def test_mkl_is_strict_on_processors_with_avx2_alone(flags: str, expected: dict[str, str], tmp_path: Path) -> None:
    environment: dict[str, str] = {}
    fix_summation_order(environment, write_cpuinfo(tmp_path, flags))
    assert environment == expected


def test_a_variable_of_the_user_and_an_unknown_processor_change_nothing(tmp_path: Path) -> None:
    environment = {"MKL_CBWR": "COMPATIBLE"}
    fix_summation_order(environment, write_cpuinfo(tmp_path, "avx2"))
    assert environment == {"MKL_CBWR": "COMPATIBLE"}
    environment.clear()
    fix_summation_order(environment, tmp_path / "missing")
    assert environment == {}


@pytest.mark.skipif(
    not torch.backends.mkl.is_available() or torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="a PyTorch without MKL, or a processor without AVX2",
)
def test_bfloat16_attention_is_batch_invariant_by_mkl(tmp_path: Path) -> None:
    environment = {**os.environ, "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    environment.pop("MKL_CBWR", None)
    command = [sys.executable, "-c", CHECK_ATTENTION, str(write_cpuinfo(tmp_path, "avx2"))]
    subprocess.run(command, env=environment, check=True, timeout=4 * PATIENCE_S)
