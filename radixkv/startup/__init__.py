"""Checks before anything is served: model, attention, graphs, pool size. Then the engine is built.

Face: `build_engine`.
"""
