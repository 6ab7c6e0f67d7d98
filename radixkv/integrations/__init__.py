"""Prefix reuse inside other projects: transformers, lm-evaluation-harness, and tiers for vLLM, LMCache and SGLang.

Modules that are named after a project need that project. Nothing else in radixkv imports this package.

Public API: `Evaluator`; see also the modules `radixkv.integrations.transformers` and `radixkv.integrations.lm_eval`.
"""
