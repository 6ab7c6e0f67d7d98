"""The fleet on Ray: replicas, the router and the ingress, of which `start_fleet` makes one service.

`FleetState` knows the replicas, `Forwarder` sends calls to them again elsewhere, `Replica` and `Ingress` run in Ray.
"""
