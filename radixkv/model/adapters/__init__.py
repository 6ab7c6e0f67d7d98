"""Adapters of a model (LoRA, as peft writes it): read from directories, held within limits, applied to rows of a step.

Public API: `AdapterFiles`, `AdapterSet`, `read_adapter`.
"""
