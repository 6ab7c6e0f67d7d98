"""Finds the files of a model: a directory, a GGUF file, or a name in the local Hugging Face cache; without torch.

Public API: `locate`, `check_servable`, `ModelLocation`, `GgufFile`.
"""
