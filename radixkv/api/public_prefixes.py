"""Public prefixes, as operators see them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PublicPrefixStatus:
    """A prefix that the prompts of all tenants can reuse.

    Attributes:
        name: given by the operator.
        adapter: the digest of its adapter; empty for the base model.
        num_tokens: its length.
        num_blocks: blocks that it takes, once for all tenants.
        is_computed: whether requests can match it.
        num_users: unfinished requests and held leases that use it now.
        num_uses: requests that have used it so far.
    """

    name: str
    adapter: str
    num_tokens: int
    num_blocks: int
    is_computed: bool
    num_users: int
    num_uses: int
