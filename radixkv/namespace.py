"""Namespaces: apart from public prefixes, requests share cached tokens only within one of them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import xxhash

# Owner of the blocks of public prefixes.
PUBLIC_TENANT = "(public)"
# Owner of the token that the engine computes to check that its device works. It has no ceiling, but floors of other
# tenants and held leases may leave no block for it.
TRIAL_TENANT = "(trial)"
# The name under which statements add up the tenants that have no line of their own.
OTHER_TENANTS = "(others)"
# Names that clients must not use, and their owners.
RESERVED_TENANTS = {
    PUBLIC_TENANT: "the owner of public prefixes",
    TRIAL_TENANT: "the engine itself",
    OTHER_TENANTS: "the sum of further tenants in statements",
}


class Namespace(NamedTuple):
    """An isolation boundary: apart from the tokens of public prefixes, requests share cached tokens only if all fields
    are equal.

    Fields are compared one by one and never joined, so `("a", "bc")` is not `("ab", "c")`.

    Attributes:
        model: fingerprint of the weights and of everything else that changes K and V.
        tenant: the tenant that the data belongs to.
        adapter: digest of the adapter's content, empty for the base model. An adapter with other weights has another
            digest. Tokens that an invoked adapter computes are in the base model's namespace; see `Invocation`.
        salt: a name that isolates further, chosen by the client.
        public_prefix: the public prefix below which the tree of this namespace is rooted, and the position in it, as
            `SERIAL:TOKENS`; empty for none.
    """

    model: str
    tenant: str = ""
    adapter: str = ""
    salt: str = ""
    public_prefix: str = ""

    def is_among(self, tenant: str | None, adapter: str | None, salt: str | None) -> bool:
        """Whether the namespace has these names; None matches any. The namespace of a public prefix never matches."""
        return (
            self.tenant != PUBLIC_TENANT
            and (tenant is None or tenant == self.tenant)
            and (adapter is None or adapter == self.adapter)
            and (salt is None or salt == self.salt)
        )

    @property
    def public_prefix_tokens(self) -> int:
        """Tokens of the public prefix above the tree; 0 without one."""
        return int(self.public_prefix.rpartition(":")[2] or 0)

    @property
    def seed(self) -> int:
        """A 64-bit seed of `prefix_fingerprint`, so that equal tokens have different hashes in different namespaces."""
        return _seed(self)


class PromptKey(NamedTuple):
    """A prompt as the cache knows it.

    Attributes:
        namespace: where it is cached.
        tokens: little-endian uint32 bytes. Tokens that an invoked adapter computes are marked; see `Invocation`.
    """

    namespace: Namespace
    tokens: bytes


@lru_cache(maxsize=1024)  # called two or three times per request, and hashing takes 0.7 us
def _seed(namespace: Namespace) -> int:
    digest = xxhash.xxh3_64()
    # Without a public prefix, the seed is that of the other four fields.
    for field in namespace if namespace.public_prefix else namespace[:-1]:
        encoded = field.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.intdigest()
