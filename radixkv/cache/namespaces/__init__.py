"""What belongs to namespaces, found by tenant, and how it is forgotten.

Face: `Forest`, `OpenLeases`, `purge`.
"""
