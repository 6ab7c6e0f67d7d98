"""A transformers model whose attention works on the paged K/V; exact by default.

Public API: `Model`, `load_model`.
"""
