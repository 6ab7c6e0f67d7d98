"""Work before serving: checks of model, attention and graphs, the size of the pool, and building the engine.

Public API: `build_engine`.
"""
