"""Bits per byte of held-out text: the embedded model, compressors and bigrams."""
