"""Fuzzing with mutated messages and raw connections, against a server that the benchmark starts."""
