"""Makes MKL's results reproducible on processors without AVX-512."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

from radixkv.kernels.native.processor import processor_flags

_VARIABLE = "MKL_CBWR"  # conditional numerical reproducibility; MKL reads it at its first call
_CPUINFO = Path("/proc/cpuinfo")


def fix_summation_order(environment: MutableMapping[str, str], cpuinfo: Path = _CPUINFO) -> None:
    """Let MKL sum a row of a matmul in an order that does not depend on the other rows.

    On processors with AVX2 and without AVX-512, PyTorch uses MKL for bfloat16 matmuls, and the results for rows at the
    end of a block differ in their last bits from those of other rows. Without the C++ kernels, exact mode then has no
    batch-invariant attention. In MKL's strict mode of numerical reproducibility, all rows agree. On other processors,
    and if the user has set the variable, nothing changes.

    Args:
        environment: `os.environ`, to which `MKL_CBWR` may be added.
        cpuinfo: file that describes the processors.
    """
    flags = processor_flags(cpuinfo)
    if "avx2" in flags and "avx512f" not in flags:
        environment.setdefault(_VARIABLE, "AVX2,STRICT")
