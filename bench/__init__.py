"""Benchmarks, run from the repository root: `python -m bench.replay --help`. bench/README.md lists them."""
