"""Work before serving: checks of model, attention and graphs, the size of the pool, and building the engine.

Public API: `build_engine`, `StartProgress`; checks of a configuration: `require_usable`, `require_protected`,
`require_secret_files`; secrets of tiers: `secret_of`, `has_protection`, `mac_of`, `protection_of`, `unprotected`; the
process: `import_transformers`, `bound_spinning`, `give_back_freed_memory`.
"""
