"""Prefill a prompt twice: the second call reuses all tokens but the last."""

import sys

from radixkv.service.client import Client

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"

with Client(ADDRESS, timeout_s=60) as client:
    for _ in range(2):
        answer = client.prefill(range(200), tenant="example-prefill")
        usage = answer.usage
        print(f"{usage.cached_tokens} cached, {usage.computed_tokens} computed, {usage.prompt_tokens} in all")
