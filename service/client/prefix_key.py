"""The header `x-prefix-key`, by which a proxy sends prompts with a common prefix to the same server."""

from __future__ import annotations

import xxhash

from radixkv.service.token_ids import Prompt, read_token_ids

HEADER = "x-prefix-key"

_TOKEN_BYTES = 4


def prefix_key(request: Prompt, num_tokens: int) -> str:
    """Return the digest of a request's tenant, adapter, salt and first tokens.

    Requests for which all of these are equal have the same key, whatever follows in the prompt. The key is only a
    routing hint: other requests may have the same key.

    Args:
        request: the message with the prompt.
        num_tokens: number of first tokens that the key covers, at least 1; all tokens of a shorter prompt.
    """
    digest = xxhash.xxh3_64()
    for name in (request.tenant, request.adapter, request.salt):
        encoded = name.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    digest.update(read_token_ids(request)[: _TOKEN_BYTES * num_tokens])
    return digest.hexdigest()
