"""Short steps recorded as CUDA graphs at load.

Face: `GraphRecorder`.
"""
