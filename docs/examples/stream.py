"""Stream tokens. The next turn of the conversation reuses prompt and completion."""

import sys

from radixkv.service.client import Client

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"

with Client(ADDRESS, timeout_s=60) as client:
    conversation = list(range(100))
    for turn in (1, 2):
        news = list(client.generate(conversation, tenant="example-stream", max_new_tokens=8, ignore_eos=True))
        print(f"turn {turn}: {news[0].usage.cached_tokens} of {len(conversation)} tokens cached")
        for part in news:
            conversation.extend(part.token_ids)
        conversation.extend([7, 8, 9])  # what the user says next
