"""The operations on the pool in torch, for a CPU."""

from __future__ import annotations

from radixkv.kernels import gathered_attention, reference


class TorchKernels:
    """Implements `AttentionKernels` with torch's scatter, gather and fused attention. Serves models on a CPU."""

    write_kv = staticmethod(reference.write_kv)
    paged_attention = staticmethod(gathered_attention.paged_attention)
    copy_blocks = staticmethod(reference.copy_blocks)
