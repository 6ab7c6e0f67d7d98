"""LoRA adapters by name: loading, replacing and unloading them while requests run.

Public API: `Adapters`, `AdapterSource`, `AdapterDirectory`.
"""
