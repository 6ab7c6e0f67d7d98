"""Attacks on a server of its own, with an innocent caller beside them: `python -m bench.hostile`."""
