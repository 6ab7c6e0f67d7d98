"""Short steps that are recorded as CUDA graphs when the model is loaded.

Public API: `GraphRecorder`.
"""
