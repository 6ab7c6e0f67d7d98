"""One forward pass: chunks of requests in, logits out.

Face: `Runner`, `Chunk`.
"""
