"""Finds out why the prompts of a log or of a running server are not reused, and groups the causes.

For a log, it also measures what fixing each cause saves. It needs neither an engine nor torch. `radixkv doctor` prints
the results.

Public API: `diagnose`, `PromptLog`, `LogDiagnosis`, `MissCause`, `MissProfiler`.
"""
