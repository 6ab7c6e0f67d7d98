"""A fake of FlashInfer 0.6.7's paged prefill: the same signatures, computed by torch."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch


class BatchPrefillWithPagedKVCacheWrapper:
    """Attention as `flashinfer/prefill.py` documents it, with layout "HND" and a causal mask; all else is refused."""

    made: list[BatchPrefillWithPagedKVCacheWrapper]  # all that were constructed since `install`

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        assert not use_cuda_graph
        self.workspace, self.backend, self.num_plans = float_workspace_buffer, backend, 0
        self.made.append(self)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        arrays = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(array.dtype == torch.int32 and array.dim() == 1 for array in arrays)
        assert not any(array.is_cuda for array in arrays), (
            "FlashInfer plans on the host, and would wait for tensors on the device"
        )
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert causal
        assert sm_scale is not None
        assert num_qo_heads % num_kv_heads == 0
        self.starts, self.page_starts, self.pages, self.last_page_lens = (array.tolist() for array in arrays)
        assert all(1 <= last_page_len <= page_size for last_page_len in self.last_page_lens)
        self.shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self.dtypes = (q_data_type, kv_data_type)
        self.scale, self.window_left, self.softcap = sm_scale, window_left, logits_soft_cap or 0.0
        self.num_plans += 1

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_block_scales: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> torch.Tensor:
        num_qo_heads, num_kv_heads, head_dim, page_size = self.shape
        assert isinstance(paged_kv_cache, torch.Tensor)
        assert paged_kv_cache.shape[1:] == (2, num_kv_heads, page_size, head_dim)
        assert paged_kv_cache[0, 0].is_contiguous(), "a page of one head is contiguous"
        assert (q.dtype, paged_kv_cache.dtype) == self.dtypes
        assert q.shape == (self.starts[-1], num_qo_heads, head_dim)
        assert out is not None
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        for request in range(len(self.last_page_lens)):
            rows = slice(self.starts[request], self.starts[request + 1])
            pages = self.pages[self.page_starts[request] : self.page_starts[request + 1]]
            num_keys = (len(pages) - 1) * page_size + self.last_page_lens[request]
            key, value = paged_kv_cache[pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :num_keys].float()
            out[rows] = self._attend(q[rows].float(), key, value).to(out.dtype)
        return out

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        group_size = query.shape[1] // key.shape[0]
        key, value = (each.repeat_interleave(group_size, 0) for each in (key, value))
        scores = query.transpose(0, 1) @ key.mT * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        distance = torch.arange(key.shape[1] - len(query), key.shape[1])[:, None] - torch.arange(key.shape[1])
        is_visible = distance >= 0
        if self.window_left >= 0:
            is_visible &= distance <= self.window_left
        return (scores.masked_fill(~is_visible, float("-inf")).softmax(-1) @ value).transpose(0, 1)


def install(monkeypatch: pytest.MonkeyPatch) -> list[BatchPrefillWithPagedKVCacheWrapper]:
    """Let `import flashinfer` find the stand-in. Returns the wrappers that are made."""
    import importlib.machinery
    import sys

    module: Any = ModuleType("flashinfer")
    module.__spec__ = importlib.machinery.ModuleSpec("flashinfer", None)
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    BatchPrefillWithPagedKVCacheWrapper.made = []
    return BatchPrefillWithPagedKVCacheWrapper.made
