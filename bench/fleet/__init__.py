"""Simulated fleets and the time of a routing decision: `python -m bench.fleet`."""
