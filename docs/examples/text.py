"""Text in, text out: streamed, and as a whole. The second request reuses the prompt of the first."""

import sys

from radixkv import Client

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
PROMPT = "And the Lord said unto Moses,"

with Client(ADDRESS, timeout_s=60) as client:
    print(PROMPT, end="")
    for chunk in client.generate(PROMPT, tenant="example-text", max_new_tokens=24):
        print(chunk.text, end="", flush=True)
    print()

    answer = client.generate(PROMPT, tenant="example-text", max_new_tokens=24, stop=[","])
    print(repr(answer.read()))
    usage = answer.response.usage
    print(f"{usage.cached_tokens} of {usage.prompt_tokens} tokens of the prompt were cached")
