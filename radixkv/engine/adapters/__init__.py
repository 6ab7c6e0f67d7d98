"""LoRA adapters by name: loading, replacing and unloading them while requests run.

Face: `Adapters`, `AdapterNames`, `AdapterDevice`.
"""
