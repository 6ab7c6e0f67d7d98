"""Purge the cache of one tenant."""

import sys

from radixkv.service.client import Client

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"

with Client(ADDRESS, timeout_s=60) as client:
    client.prefill(range(128), tenant="example-purge")
    print(f"{client.purge(tenant='example-purge').freed_blocks} blocks freed")
    print(f"{client.probe(range(128), tenant='example-purge').cached_tokens} tokens would be reused")
