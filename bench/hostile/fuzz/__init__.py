"""Mutated messages and raw connections, against a server of its own."""
