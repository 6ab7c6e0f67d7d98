"""Attacks on a server that this benchmark starts, next to a well-behaved client: `python -m bench.hostile`."""
