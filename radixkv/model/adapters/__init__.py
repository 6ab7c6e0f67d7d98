"""LoRA adapters in peft's format: read from directories, kept within limits, applied to the rows of a step.

Public API: `AdapterFiles`, `AdapterSet`, `read_adapter`.
"""
