"""Compares ways to reuse K and V on the same traffic."""
