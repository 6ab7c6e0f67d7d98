"""The environment names kernels that must not be used; unknown names are refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from radixkv.errors import ConfigError
from radixkv.model.attention.interface import AttentionKind, AttentionUse
from radixkv.model.attention.refused_attention import (
    FLASHINFER,
    MODES,
    NAMES,
    POINTERS,
    SPECIALIZED,
    VARIABLE,
    format_refused,
    refused_names,
)
from radixkv.model.attention.triton_kernels import candidates
from radixkv.storage.device_pool import KVShape


def test_names_are_refused_in_one_mode_or_in_both() -> None:
    given = {VARIABLE: f" {SPECIALIZED} in exact mode,{FLASHINFER} ,"}
    assert refused_names("exact", given) == {SPECIALIZED, FLASHINFER}
    assert refused_names("fast", given) == {FLASHINFER}
    assert refused_names("fast", {}) == refused_names("fast", {VARIABLE: ""}) == frozenset()


@pytest.mark.parametrize("given", ["specialized", f"{SPECIALIZED} in slow mode", POINTERS])
def test_another_name_is_refused_by_name(given: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{VARIABLE}: expected some of FlashInfer attention, .*, got '{given}'$"):
        refused_names("fast", {VARIABLE: given})


def test_the_written_value_is_read() -> None:
    every = list(itertools.product(NAMES, MODES))
    assert all(refused_names(mode, {VARIABLE: format_refused(every)}) == set(NAMES) for mode in MODES)
    assert refused_names("fast", {VARIABLE: format_refused(every[:1])}) == frozenset()


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_every_candidate_but_the_last_can_be_refused(kv_dtype: str) -> None:
    shape = KVShape(num_layers=1, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16).stored_as(kv_dtype)
    kind, device = AttentionKind(4, None, None), torch.device("cuda")
    for is_exact in (False, True):
        use = AttentionUse((kind,), torch.bfloat16, shape, 64, device, is_exact=is_exact)
        *preferred, last = candidates(use, (9, 0))
        assert set(preferred) <= set(NAMES)
        assert last == POINTERS
