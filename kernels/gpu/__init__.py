"""Triton kernels, and the plans that the host makes for them. Modules that import Triton are needed on a GPU only.

Public API: attention: `paged_attention`, `plan_attention`, `AttentionPlan`, `DeviceCapacity`, `tile_rows_for`,
`fitting_tile_rows`, `supports`; K/V blocks: `write_kv`, `copy_blocks`, `hadamard_transform`, `plan_dequantize`,
`DequantizePlan`, `dequantize_blocks`; layers: `linear`, `try_tiles`, `rms_norm`, `add_rms_norm`, `row_mean`, `swiglu`;
adapters: `add_low_rank`, `LowRankStep`, `padded_rank`, `low_rank_rows_agree`.
"""
