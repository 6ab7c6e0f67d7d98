"""The choice of a replica for a request: a view of what each has cached and what waits there, and the rule.

Public API: `Router`, `FleetView`, `choose`.
"""
