"""Short steps that are captured as CUDA graphs when the model is loaded.

Public API: `GraphCapturer`.
"""
