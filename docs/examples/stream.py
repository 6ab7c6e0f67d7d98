"""Stream the completions of a conversation. The second turn reuses the prompt and the completion of the first."""

import sys

from radixkv.service.client import Client

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"

with Client(ADDRESS, timeout_s=60) as client:
    conversation = list(range(100))
    for turn in (1, 2):
        responses = list(client.generate(conversation, tenant="example-stream", max_new_tokens=8, ignore_eos=True))
        print(f"turn {turn}: {responses[0].usage.cached_tokens} of {len(conversation)} tokens cached")
        for response in responses:
            conversation.extend(response.token_ids)
        conversation.extend([7, 8, 9])  # what the user says next
