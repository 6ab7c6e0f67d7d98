"""Runs attention kernels of other projects on the same queries, K and V as ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from bench.parts.attention_inputs import AttentionInputs
from bench.parts.peers.sglang import load_extend_attention

# One call per input set. A call returns `[suffix_tokens, num_query_heads, head_dim]`.
Calls = list[Callable[[], torch.Tensor]]
Prepare = Callable[[AttentionInputs], Calls]

NAMES = ("sdpa_flash", "sdpa_cudnn", "cudnn_merged", "fa3_fwd", "flex", "sglang", "flashinfer_fa2", "flashinfer_fa3")

_FLASHINFER_WORKSPACE_BYTES = 1 << 28


class PeerUnavailable(Exception):
    """A peer is not available on this machine; the message says why."""


def peer(name: str, sglang: Path | None) -> Prepare:
    """Return the function that prepares the calls of a peer.

        sdpa_flash      torch's SDPA with the FlashAttention back end, on contiguous K/V
        sdpa_cudnn      torch's SDPA with the cuDNN back end, on contiguous K/V; a mask where there is a prefix
        cudnn_merged    cuDNN over the prefix and over the suffix, merged by torch: no mask is read
        fa3_fwd         FlashAttention 3 of the wheel fa3-fwd, on contiguous K/V: it has no paged KV cache
        flex            torch's flex_attention, compiled for the shape, on contiguous K/V
        sglang          SGLang's Triton kernel, over a pool of single tokens, in the order of our blocks
        flashinfer_*    FlashInfer over our own pool and block table

    Args:
        name: one of `NAMES`.
        sglang: folder of SGLang's unpacked wheel; None if there is none.
    """
    prepare: dict[str, Prepare] = {
        "sdpa_flash": _sdpa_flash,
        "sdpa_cudnn": _sdpa_cudnn,
        "cudnn_merged": _cudnn_merged,
        "fa3_fwd": _fa3_fwd,
        "flex": _flex,
        "sglang": partial(_sglang, wheel=sglang),
        "flashinfer_fa2": partial(_flashinfer, backend="fa2"),
        "flashinfer_fa3": partial(_flashinfer, backend="fa3"),
    }
    return prepare[name]


def _by_head(tokens: torch.Tensor) -> torch.Tensor:
    """Lay `[num_tokens, num_heads, head_dim]` out as a contiguous `[1, num_heads, num_tokens, head_dim]`."""
    return tokens.transpose(0, 1).contiguous()[None]


def _by_token(heads: torch.Tensor) -> torch.Tensor:
    """Undo `_by_head`, without a copy."""
    return heads[0].transpose(0, 1)


def _contiguous_sets(inputs: AttentionInputs) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    sets = zip(inputs.queries, inputs.keys, inputs.values, strict=True)
    return [(_by_head(query), _by_head(key), _by_head(value)) for query, key, value in sets]


def _make_calls(inputs: AttentionInputs, attend: Callable[..., torch.Tensor]) -> Calls:
    """Copy each input set into the layout by head, and return a call per set that computes its attention."""

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return _by_token(attend(query, key, value))

    return [partial(call, *each) for each in _contiguous_sets(inputs)]


def _sdpa_flash(inputs: AttentionInputs) -> Calls:
    # Not `is_causal`, which aligns the first query with the first key: here the last query sees the last key.
    mask: Any = causal_lower_right(inputs.case.suffix_tokens, inputs.case.num_tokens)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return scaled_dot_product_attention(query, key, value, mask, scale=inputs.scale, enable_gqa=True)

    return _make_calls(inputs, attend)


def _sdpa_cudnn(inputs: AttentionInputs) -> Calls:
    _require_gpu(inputs)
    case, device = inputs.case, inputs.queries[0].device
    mask = None
    if case.prefix_tokens:
        # Added to the scores. SDPA would convert a mask of booleans into this one at each call.
        mask = torch.full((case.suffix_tokens, case.num_tokens), float("-inf"), dtype=torch.bfloat16, device=device)
        mask = mask.triu(case.prefix_tokens + 1)[None, None]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(
                query, key, value, mask, is_causal=mask is None, scale=inputs.scale, enable_gqa=True
            )

    return _make_calls(inputs, attend)


def _cudnn_merged(inputs: AttentionInputs) -> Calls:
    _require_gpu(inputs)
    prefix = inputs.case.prefix_tokens
    if not prefix:
        raise PeerUnavailable("expected a cached prefix to merge with, got none")

    def attend_part(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> list[torch.Tensor]:
        """Return the output for some of the keys, and the log-sum-exp of their scores, `[..., 1]`."""
        output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, is_causal=is_causal, scale=inputs.scale
        )
        return [output, lse.reshape(*query.shape[:3], 1)]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        cached, cached_lse = attend_part(query, key[:, :, :prefix], value[:, :, :prefix], is_causal=False)
        new, new_lse = attend_part(query, key[:, :, prefix:], value[:, :, prefix:], is_causal=True)
        # Each part is weighted by its share of the sum of the exponentials of all scores.
        return torch.lerp(new, cached, torch.sigmoid(cached_lse - new_lse).to(new.dtype))

    return _make_calls(inputs, attend)


def _fa3_fwd(inputs: AttentionInputs) -> Calls:
    _require_gpu(inputs)
    from fa3_fwd_interface import flash_attn_func  # rarely installed

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # The causal mask is aligned with the last key. With `num_splits=0` the kernel chooses the number of splits.
        output: torch.Tensor = flash_attn_func(
            query[None], key[None], value[None], softmax_scale=inputs.scale, causal=True, num_splits=0
        )
        return output[0]

    return [partial(call, *each) for each in zip(inputs.queries, inputs.keys, inputs.values, strict=True)]


def _flex(inputs: AttentionInputs) -> Calls:
    prefix, device = inputs.case.prefix_tokens, inputs.queries[0].device

    def is_visible(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return key <= query + prefix

    mask = create_block_mask(is_visible, None, None, inputs.case.suffix_tokens, inputs.case.num_tokens, device=device)
    options: dict[str, Any] = {"block_mask": mask, "scale": inputs.scale, "enable_gqa": True}
    if device.type == "cuda":
        torch._dynamo.reset()  # torch compiles only a few shapes of one function
        return _make_calls(inputs, partial(torch.compile(flex_attention, fullgraph=True, dynamic=False), **options))

    def attend_without_warning(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns if it was not compiled
            attended: Any = flex_attention(query, key, value, **options)
        return attended  # type: ignore[no-any-return]

    return _make_calls(inputs, attend_without_warning)


def _sglang(inputs: AttentionInputs, wheel: Path | None) -> Calls:
    if wheel is None:
        raise PeerUnavailable("--sglang: expected the folder of an unpacked wheel, got none")
    extend_attention, case, device = load_extend_attention(wheel), inputs.case, inputs.queries[0].device
    blocks = inputs.batch.block_tables[0].long()
    offsets = torch.arange(inputs.heads.block_size, device=device)
    slots = (blocks[:, None] * inputs.heads.block_size + offsets).flatten()[: case.num_tokens]
    # Where the suffix and the prefix of the only request begin and end.
    bounds = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (case.suffix_tokens, case.prefix_tokens)]

    def call(query: torch.Tensor, suffix_kv: list[torch.Tensor], kv_buffers: list[torch.Tensor]) -> torch.Tensor:
        output = torch.empty_like(query)
        arguments = (query, *suffix_kv, output, *kv_buffers, *bounds, slots[: case.prefix_tokens])
        # No custom mask, causal, no offsets of a mask; the longest suffix; the scales of K and V.
        extend_attention(*arguments, None, True, None, case.suffix_tokens, 1.0, 1.0, sm_scale=inputs.scale)
        return output

    calls: Calls = []
    num_slots = blocks.numel() * inputs.heads.block_size
    for query, *kv in zip(inputs.queries, inputs.keys, inputs.values, strict=True):
        suffix_kv = [each[case.prefix_tokens :] for each in kv]
        kv_buffers = [each.new_zeros(num_slots, *each.shape[1:]).index_copy_(0, slots, each) for each in kv]
        calls.append(partial(call, query, suffix_kv, kv_buffers))
    return calls


def _flashinfer(inputs: AttentionInputs, backend: str) -> Calls:
    _require_gpu(inputs)
    import flashinfer  # rarely installed

    case, heads, device = inputs.case, inputs.heads, inputs.queries[0].device
    blocks = inputs.batch.block_tables[0]
    workspace = torch.empty(_FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend=backend)
    last_block_tokens = (case.num_tokens - 1) % heads.block_size + 1
    # Where the queries and the blocks of the only request begin and end.
    bounds = [[0, case.suffix_tokens], [0, blocks.numel()]]
    wrapper.plan(
        *(torch.tensor(each, dtype=torch.int32, device=device) for each in bounds),
        blocks,
        torch.tensor([last_block_tokens], dtype=torch.int32, device=device),
        heads.num_query_heads,
        heads.num_kv_heads,
        heads.head_dim,
        heads.block_size,
        causal=True,
        sm_scale=inputs.scale,
        q_data_type=torch.bfloat16,
    )
    # one layer: [num_blocks, 2, num_kv_heads, block_size, head_dim], the layout that FlashInfer takes
    return [partial(wrapper.run, query, inputs.pool.values[:, layer]) for layer, query in enumerate(inputs.queries)]


def _require_gpu(inputs: AttentionInputs) -> None:
    if inputs.queries[0].device.type != "cuda":
        raise PeerUnavailable("needs a CUDA device")
