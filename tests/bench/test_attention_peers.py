"""Peers that are not installed are imitated in torch, and check that they get what their documentation requires."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from bench import attention_peers
from bench.attention_peers import peer
from bench.parts.attention_inputs import (
    AttentionCase,
    AttentionInputs,
    Heads,
    expected_answer,
    make_inputs,
    worst_error,
)

HEADS = Heads(num_query_heads=4, num_kv_heads=2, head_dim=32, block_size=16)


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> AttentionInputs:
    monkeypatch.setattr(attention_peers, "_require_gpu", lambda inputs: None)
    return make_inputs(AttentionCase(20, 43), HEADS, cache_bytes=1, device=torch.device("cpu"))


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, is_visible: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over `[num_heads, num_tokens, head_dim]` in float32, and the log-sum-exp of the scores."""
    queries_per_kv_head = query.shape[0] // key.shape[0]
    scores = query.float() @ key.float().repeat_interleave(queries_per_kv_head, 0).mT * scale
    if is_visible is not None:
        scores = scores.masked_fill(~is_visible, float("-inf"))
    return scores.softmax(-1) @ value.float().repeat_interleave(queries_per_kv_head, 0), scores.logsumexp(-1)


def error_of(name: str, inputs: AttentionInputs) -> float:
    return worst_error(peer(name, None)(inputs)[0](), expected_answer(inputs))


def test_the_attention_over_prefix_and_suffix_by_cudnn_is_merged_by_log_sum_exp(
    inputs: AttentionInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cudnn(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: None,
        wants_lse: bool,
        *,
        is_causal: bool,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert wants_lse
        visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril() if is_causal else None
        output, lse = attend(query[0], key[0], value[0], scale, visible)
        return output.to(query.dtype)[None], lse[None, ..., None]

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
    assert error_of("cudnn_merged", inputs) < 0.02


@pytest.mark.parametrize("prefix_tokens", [43, 0])
def test_cudnn_gets_a_mask_of_the_visible_keys(prefix_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the mask is tested, with another back end of torch, since cuDNN is not available."""
    monkeypatch.setattr(attention_peers, "_require_gpu", lambda inputs: None)
    monkeypatch.setattr(attention_peers, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    inputs = make_inputs(AttentionCase(20, prefix_tokens), HEADS, 1, torch.device("cpu"))
    assert error_of("sdpa_cudnn", inputs) < 0.02


class FakePagedWrapper:
    """Imitates FlashInfer's `BatchPrefillWithPagedKVCacheWrapper`, as documented, for one request."""

    def __init__(self, workspace: torch.Tensor, layout: str, backend: str) -> None:
        assert (workspace.dtype, layout, backend) == (torch.uint8, "HND", "fa2")

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        *shape: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
    ) -> None:
        assert shape == (HEADS.num_query_heads, HEADS.num_kv_heads, HEADS.head_dim, HEADS.block_size)
        assert causal
        assert q_data_type == torch.bfloat16
        assert paged_kv_indices.dtype == qo_indptr.dtype == torch.int32
        assert paged_kv_indptr.tolist() == [0, len(paged_kv_indices)]
        self.num_tokens = (len(paged_kv_indices) - 1) * HEADS.block_size + int(paged_kv_last_page_len)
        self.num_queries = int(qo_indptr[1])
        self.pages = paged_kv_indices
        self.scale = sm_scale

    def run(self, query: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        kv = paged_kv_cache[self.pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.num_tokens]
        visible = torch.ones(self.num_queries, self.num_tokens, dtype=torch.bool)
        visible = visible.tril(self.num_tokens - self.num_queries)
        return attend(query.transpose(0, 1), kv[0], kv[1], self.scale, visible)[0].transpose(0, 1)


def test_flashinfer_reads_the_pool_of_radixkv(inputs: AttentionInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = FakePagedWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    assert error_of("flashinfer_fa2", inputs) < 0.02


def test_flash_attention_3_gets_contiguous_tokens_and_a_mask_that_ends_at_the_bottom_right(
    inputs: AttentionInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flash_attn_func(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float, causal: bool, num_splits: int
    ) -> torch.Tensor:
        assert causal
        assert num_splits == 0
        assert k.is_contiguous()
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        query, key, value = (each[0].transpose(0, 1) for each in (q, k, v))
        return attend(query, key, value, softmax_scale, visible)[0].transpose(0, 1)[None].to(q.dtype)

    module: Any = ModuleType("fa3_fwd_interface")
    module.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)
    assert error_of("fa3_fwd", inputs) < 0.02
