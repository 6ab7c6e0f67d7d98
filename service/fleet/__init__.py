"""A fleet on Ray: several engines behind one gRPC address.

`FleetState` tracks the replicas and chooses one for each request, `Forwarder` forwards calls to them, and `Replica` and
`Ingress` run in processes of Ray.
"""
