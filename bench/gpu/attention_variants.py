"""The variants of an attention case that are measured: other pools and modes, and the kernels that support them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from bench.parts.attention_inputs import AttentionCase
from radixkv.kernels.quantization import INT4
from radixkv.model.attention.refused_attention import (
    DEQUANTIZED,
    SPECIALIZED,
    SPECIALIZED_DEQUANTIZED,
    refused_names,
)

QUANTIZED = (torch.float8_e4m3fn, torch.int8, INT4)

# `served`: the kernel that the service uses in fast mode. `plain`: the kernel of `served`, then the one that loads K/V
# through plain pointers, then exact mode, each over a pool that is not quantized. `pointers`: the kernels without warp
# specialization. `specialized`: the kernel that loads through pointers, then the warp-specialized ones. `all`: the
# variants of `pointers` and `specialized`, but blocks are dequantized first for only one of both kernels.
CHOICES = ("served", "plain", "pointers", "specialized", "all")


@dataclass(frozen=True, slots=True)
class Permissions:
    """Kernels that may be measured. Those for Hopper run only there; kernels that the environment excludes never run.

    Attributes:
        specialized: the warp-specialized kernel in fast mode.
        specialized_exact: the same in exact mode.
        specialized_dequantized: the same over blocks that are dequantized first.
        dequantized: the kernel that loads through pointers, over blocks that are dequantized first.
    """

    specialized: bool
    specialized_exact: bool
    specialized_dequantized: bool
    dequantized: bool

    @classmethod
    def on(cls, device: torch.device) -> Permissions:
        """Return the permissions of a device and the environment. A CPU, in a dry run, counts as a Hopper GPU."""
        is_hopper = device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 9
        fast, exact = refused_names("fast"), refused_names("exact")
        return cls(
            specialized=is_hopper and SPECIALIZED not in fast,
            specialized_exact=is_hopper and SPECIALIZED not in exact,
            specialized_dequantized=is_hopper and SPECIALIZED_DEQUANTIZED not in fast,
            dequantized=DEQUANTIZED not in fast,
        )


def first_case(case: AttentionCase, choice: str, allowed: Permissions) -> AttentionCase:
    """Return the case that is measured first, with which the others are compared."""
    return replace(case, is_specialized=choice in ("served", "plain") and allowed.specialized)


def variants(case: AttentionCase, choice: str, allowed: Permissions, dequantized_suffix: int) -> list[AttentionCase]:
    """List the cases that are measured after the first one.

    Args:
        case: the first case.
        choice: one of `CHOICES`.
        allowed: kernels that may be measured.
        dequantized_suffix: minimum number of suffix tokens for which blocks are also dequantized first.
    """
    cases: list[AttentionCase] = []
    quantized = [replace(case, kv_dtype=kv_dtype) for kv_dtype in QUANTIZED]
    if choice == "plain":
        if case.is_specialized:
            cases.append(replace(case, is_specialized=False))
        return [*cases, replace(case, is_specialized=allowed.specialized_exact, is_exact=True)]
    if choice in ("pointers", "all"):
        cases += [replace(case, is_shuffled=False), replace(case, is_exact=True)]
    if choice in ("specialized", "all"):
        if allowed.specialized:
            cases.append(replace(case, is_specialized=True))
        if allowed.specialized_exact:
            cases.append(replace(case, is_specialized=True, is_exact=True))
    if choice in ("pointers", "all"):
        cases += quantized
    if case.suffix_tokens < dequantized_suffix:
        return cases
    dequantized = [replace(variant, is_dequantized_first=True) for variant in quantized]
    if choice in ("specialized", "all") and allowed.specialized_dequantized:
        cases += [replace(variant, is_specialized=True) for variant in dequantized]
    elif choice in ("pointers", "all") and allowed.dequantized:
        cases += dequantized
    return cases
