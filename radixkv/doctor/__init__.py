"""Finds out why the prompts of a log are not reused, groups the causes, and measures what fixing them saves.

It has no engine and no torch. `radixkv doctor` prints what it finds.

Public API: `diagnose`, `PromptLog`, `MissCause`, `LogDiagnosis`.
"""
