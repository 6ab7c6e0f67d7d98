"""One forward pass: chunks of requests in, logits out.

Public API: `Runner`, `Chunk`.
"""
