"""Estimates made before a model is served: memory arithmetic, and traces replayed through the cache."""
