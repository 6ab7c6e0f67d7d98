"""A header by which a proxy sends prompts that begin alike to the same server."""

from __future__ import annotations

import xxhash

from radixkv.service.token_ids import Prompt, read_token_ids

HEADER = "x-prefix-key"

_TOKEN_BYTES = 4

Metadata = tuple[tuple[str, str], ...]


class PrefixKey:
    """Makes the header of a prompt: a digest of who asks and of its first tokens.

    Prompts with equal tenant, adapter, salt and first tokens have equal keys, whatever comes after. A hint for routing,
    never an identity.

    Args:
        num_tokens: tokens that the key covers; 0 for no header. A prompt that is shorter is covered whole.

    Raises:
        ValueError: `num_tokens` is not a whole number from 0.
    """

    def __init__(self, num_tokens: int) -> None:
        if isinstance(num_tokens, bool) or not (isinstance(num_tokens, int) and num_tokens >= 0):
            raise ValueError(f"prefix_key_tokens: expected a whole number from 0, got {num_tokens!r}")
        self._num_bytes = _TOKEN_BYTES * num_tokens

    def metadata(self, request: Prompt) -> Metadata | None:
        """Return the metadata of a call with this request; None without a header."""
        if not self._num_bytes:
            return None
        digest = xxhash.xxh3_64()
        for name in (request.tenant, request.adapter, request.salt):
            encoded = name.encode()
            digest.update(len(encoded).to_bytes(4, "little") + encoded)
        digest.update(read_token_ids(request)[: self._num_bytes])
        return ((HEADER, digest.hexdigest()),)
