"""Retain a system prompt in the cache for an hour."""

import sys

from radixkv.service.client import Client, Retention

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"

with Client(ADDRESS, timeout_s=60) as client:
    client.prefill(range(128), tenant="example-retain")
    granted = client.retain(range(128), Retention(priority=80, ttl_s=3600), tenant="example-retain").retained
    print(f"{granted.granted_tokens} granted, {granted.refused_tokens} refused, {granted.uncached_tokens} not cached")
