"""Prefixes that an operator makes public: computed once, and found by every tenant before its own tree.

Face: `PublicPrefixes`, `HungLease`.
"""
