"""Prefix reuse inside other projects: a cache for transformers, and a model for lm-evaluation-harness.

Its modules need the projects that they are for. Nothing else in radixkv imports this package.

Public API: `Evaluator`; see also the modules `radixkv.integrations.transformers` and `radixkv.integrations.lm_eval`.
"""
