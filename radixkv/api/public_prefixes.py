"""Public prefixes, as operators see them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublicPrefixStatus:
    """A prefix that the prompts of all tenants can reuse.

    Attributes:
        name: the name that the operator has chosen.
        adapter: the digest of the prefix's adapter; empty for the base model.
        num_tokens: length of the prefix.
        num_blocks: blocks of the prefix, which exist once for all tenants.
        is_computed: whether requests can match the prefix.
        num_users: unfinished requests and held leases that use the prefix now.
        num_uses: requests that have used the prefix so far.
    """

    name: str
    adapter: str
    num_tokens: int
    num_blocks: int
    is_computed: bool
    num_users: int
    num_uses: int
