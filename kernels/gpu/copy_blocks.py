"""Copies whole blocks on a GPU, for copy-on-write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv.kernels.kv_pool import KVPool

# 32-bit words per program: 16 KiB, eight 16-byte accesses per thread.
_SPAN_WORDS = 4096


def copy_blocks(pool: KVPool, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Compute `reference.copy_blocks` in one launch.

    Args:
        pool: the K/V, ordered by block.
        sources: int64 `[num_copies]` block ids, contiguous.
        targets: int64 `[num_copies]` block ids, contiguous, all different and none of them a source.

    Raises:
        ValueError: `sources` or `targets` is strided.
    """
    if not (sources.is_contiguous() and targets.is_contiguous()):
        raise ValueError("sources, targets: expected contiguous tensors, got strided ones")
    num_copies = sources.shape[0]
    if num_copies == 0:
        return
    words = pool.blocks.view(torch.int32)  # [num_blocks, words per block]
    block_words = words.shape[1]
    _copy_span[(num_copies, triton.cdiv(block_words, _SPAN_WORDS))](
        words, sources, targets, block_words, SPAN_WORDS=_SPAN_WORDS, num_warps=4, enable_fp_fusion=True
    )


# `sources` and `targets` are rows of one tensor, so their alignment varies, and Triton would compile a kernel for each
# alignment.
@triton.jit(do_not_specialize_on_alignment=["sources", "targets"])  # type: ignore[untyped-decorator]
def _copy_span(words, sources, targets, block_words, SPAN_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy one span of one block."""
    source = tl.load(sources + tl.program_id(0)).to(tl.int64) * block_words
    target = tl.load(targets + tl.program_id(0)).to(tl.int64) * block_words
    offsets = tl.program_id(1) * SPAN_WORDS + tl.arange(0, SPAN_WORDS)
    is_word = offsets < block_words
    tl.store(words + target + offsets, tl.load(words + source + offsets, mask=is_word), mask=is_word)
