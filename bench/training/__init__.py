"""Trains the embedded model: its text, the merges of its tokenizer, and its weights."""
