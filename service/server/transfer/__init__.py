"""K/V from server to server over gRPC.

Face: `KVSender`, `KVFetcher`.
"""
