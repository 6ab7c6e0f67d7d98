"""The variants of the C++ kernels. `setup.py` imports this module, so it uses only the standard library."""

from __future__ import annotations

from typing import NamedTuple

# Extensions of x86-64 that the sources use, by their names in /proc/cpuinfo, and GCC's option for each.
_OPTIONS = {
    "avx2": "-mavx2",
    "fma": "-mfma",
    "f16c": "-mf16c",
    "avx512f": "-mavx512f",
    "avx512bw": "-mavx512bw",
    "avx512dq": "-mavx512dq",
    "avx512vl": "-mavx512vl",
    "avx512_bf16": "-mavx512bf16",
    "amx_tile": "-mamx-tile",
    "amx_bf16": "-mamx-bf16",
}


class Variant(NamedTuple):
    """A set of instructions that the kernels are compiled for.

    A processor can run a variant only if it has all of the features. The compiler's options are derived from them.

    Attributes:
        name: name of the variant, in file names and in the log.
        capability: the minimum that `processor_capability` must return.
        features: extensions of x86-64, by their names in /proc/cpuinfo.
    """

    name: str
    capability: str
    features: tuple[str, ...]

    @property
    def options(self) -> tuple[str, ...]:
        """The compiler's options for this set of instructions, on top of plain x86-64."""
        return tuple(_OPTIONS[feature] for feature in self.features)


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl")
_BF16 = (*_AVX512, "avx512_bf16")

# The fastest first; each one has all features of those after it.
VARIANTS = (
    Variant("amx", "AMX", (*_BF16, "amx_tile", "amx_bf16")),
    Variant("avx512_bf16", "AVX512", _BF16),
    Variant("avx512", "AVX512", _AVX512),
    Variant("avx2", "AVX2", _AVX2),
)
