"""K/V from server to server over gRPC.

Public API: `KVSender`, `KVFetcher`.
"""
