"""Blocks that layers with a sliding window need: `python -m bench.windows`."""
