"""A transformers model whose attention works on the paged K/V; exact by default.

Face: `Model`, `load_model`.
"""
