"""Work before serving: checks of model, attention and graphs, the size of the pool, and building the engine.

Face: `build_engine`.
"""
