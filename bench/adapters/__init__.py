"""Steps whose rows have several adapters: `python -m bench.adapters`."""
