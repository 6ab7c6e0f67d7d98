"""Trees and open leases of namespaces, found by tenant, and the purge that forgets them.

Face: `Forest`, `OpenLeases`, `purge`.
"""
