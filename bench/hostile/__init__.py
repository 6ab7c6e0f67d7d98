"""Attacks on a server that this benchmark starts, next to an innocent client: `python -m bench.hostile`."""
