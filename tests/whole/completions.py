"""Sampled completions over gRPC."""

from __future__ import annotations

from typing import Any

from radixkv.service.client import Client
from radixkv.v1.prefill_pb2 import GenerateResponse


def complete(client: Client, prompt: list[int], n: int = 1, **options: Any) -> list[tuple[list[int], GenerateResponse]]:
    """Return the tokens and the last chunk of each completion; by default they are sampled with a seed."""
    chunks = list(client.generate(prompt, **{"temperature": 1.0, "seed": 3, "n": n, **options}))
    completions = []
    for index in range(n):
        chunks_of_completion = [chunk for chunk in chunks if chunk.index == index]
        token_ids = [token_id for chunk in chunks_of_completion for token_id in chunk.token_ids]
        completions.append((token_ids, chunks_of_completion[-1]))
    return completions
