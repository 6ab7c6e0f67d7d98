"""A chat with two turns. The second turn reuses the K/V of the first one, including its completion."""

import sys

from radixkv import Client

ADDRESS = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"

with Client(ADDRESS, timeout_s=60) as client:
    messages = []
    for question in ("Hello", "Where is my father?"):
        messages.append({"role": "user", "content": question})
        answer = client.chat(messages, tenant="example-chat", max_new_tokens=32, temperature=0.7, seed=2)
        messages.append({"role": "assistant", "content": answer.read()})
        print(f"user: {question}\nassistant: {answer.text}")
        usage = answer.response.usage
        print(f"{usage.cached_tokens} of {usage.prompt_tokens} tokens of the prompt were cached")
