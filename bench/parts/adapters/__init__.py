"""Adapters for benchmarks: directories as peft writes them, and requests that ask for them in turn."""
