"""Benchmarks that need a GPU, in parts of at most ten minutes: stages, their limits, and one result file per part."""
