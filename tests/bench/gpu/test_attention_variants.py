"""Each variant measures what its name says, and no variant uses a kernel that the environment refuses."""

from __future__ import annotations

import pytest
import torch

from bench.gpu.attention_variants import CHOICES, Permissions, first_case, variants
from bench.parts.attention_inputs import AttentionCase
from radixkv.model.attention.refused_attention import DEQUANTIZED, SPECIALIZED, SPECIALIZED_DEQUANTIZED, VARIABLE

ALL = Permissions(specialized=True, specialized_exact=True, specialized_dequantized=True, dequantized=True)
NONE = Permissions(specialized=False, specialized_exact=False, specialized_dequantized=False, dequantized=False)
CASE = AttentionCase(512, 8192)


def properties_of_variants(choice: str, allowed: Permissions) -> list[tuple[bool, bool, bool]]:
    """Return for each variant whether it is warp-specialized, is exact, and dequantizes the pool first."""
    first = first_case(CASE, choice, allowed)
    measured = [first, *variants(first, choice, allowed, dequantized_suffix=512)]
    assert len(set(measured)) == len(measured)
    return [(each.is_specialized, each.is_exact, each.is_dequantized_first) for each in measured]


def test_the_kernel_that_serves_is_measured_alone() -> None:
    assert properties_of_variants("served", ALL) == [(True, False, False)]
    assert properties_of_variants("served", NONE) == [(False, False, False)]


def test_a_plain_pool_is_measured_in_three_kernels() -> None:
    assert properties_of_variants("plain", ALL) == [(True, False, False), (False, False, False), (True, True, False)]
    assert properties_of_variants("plain", NONE) == [(False, False, False), (False, True, False)]


def test_pointers_and_specialized_are_measured_separately() -> None:
    assert not any(specialized for specialized, _, _ in properties_of_variants("pointers", ALL))
    assert sum(dequantized for _, _, dequantized in properties_of_variants("pointers", ALL)) == 3
    first, *others = properties_of_variants("specialized", ALL)
    assert first == (False, False, False)
    assert others == [(True, False, False), (True, True, False), *[(True, False, True)] * 3]


@pytest.mark.parametrize("choice", CHOICES)
def test_no_refused_kernel_is_measured(choice: str) -> None:
    assert not any(specialized or dequantized for specialized, _, dequantized in properties_of_variants(choice, NONE))


def test_short_suffixes_are_not_dequantized_first() -> None:
    short = AttentionCase(64, 8192)
    assert not any(each.is_dequantized_first for each in variants(short, "all", ALL, dequantized_suffix=512))


def test_the_environment_refuses_by_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Permissions.on(cpu) == ALL
    monkeypatch.setenv(VARIABLE, f"{SPECIALIZED} in exact mode")
    assert Permissions.on(cpu) == Permissions(True, False, True, True)
    monkeypatch.setenv(VARIABLE, f"{SPECIALIZED}, {SPECIALIZED_DEQUANTIZED},{DEQUANTIZED}")
    assert Permissions.on(cpu) == NONE
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.delenv(VARIABLE)
    assert Permissions.on(torch.device("cuda")) == Permissions(False, False, False, True)
