"""The tiers inside other engines: crash-safe, bounded, encrypted stores for the K/V of vLLM, SGLang and LMCache.

The modules `vllm_connector`, `lmcache_adapter` and `sglang_storage` need the engine that they are named after; the
others need none.

Public API: `ByteStore`, `TierOptions`.
"""
