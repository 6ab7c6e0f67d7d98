"""Register a public prefix: a system prompt that is computed once and reused by all tenants."""

import sys

from radixkv.service.client import Client

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
SYSTEM_PROMPT = [index * 3 % 200 for index in range(256)]

with Client(ADDRESS, timeout_s=60) as client:
    prefix = client.public.register("example-system", SYSTEM_PROMPT)
    print(f"{prefix.tokens} tokens in {prefix.blocks} blocks")
    for tenant in ("example-one", "example-two"):
        usage = client.prefill([*SYSTEM_PROMPT, 7, 8, 9], tenant=tenant).usage
        print(f"{tenant}: {usage.public_tokens} public, {usage.computed_tokens} computed")
    client.public.unregister("example-system")
