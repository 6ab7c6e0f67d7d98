"""Benchmarks. Run from the repository root: `python -m bench.replay --help`."""
