"""Attention kernels written in torch: for the CPU."""

from __future__ import annotations

from radixkv.kernels import gathered_attention, reference


class TorchKernels:
    """Plain torch: scatter, gather and fused SDPA. What the service uses on CPU."""

    write_kv = staticmethod(reference.write_kv)
    paged_attention = staticmethod(gathered_attention.paged_attention)
    copy_blocks = staticmethod(reference.copy_blocks)
