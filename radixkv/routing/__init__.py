"""Chooses a replica for each request, from a view of what the replicas have cached and of their load.

Public API: `Router`, `Route`, `FleetView`, `FleetLoad`, `PrefixDemand`, `PromptBlocks`, `TokenTimes`, `choose`,
`make_routing`, `RoutingWeights`.
"""
