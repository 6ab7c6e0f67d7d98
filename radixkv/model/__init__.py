"""A transformers model over paged K/V, exact if wished.

Face: `Model`, `load_model`.
"""
