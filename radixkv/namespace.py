"""The boundary within which requests share cached tokens."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import xxhash

# Owner of the blocks of public prefixes.
PUBLIC_TENANT = "(public)"
# Owner of the token that the engine computes to learn whether its device works. It has no ceiling, but floors of others
# and held leases may leave it no block.
TRIAL_TENANT = "(trial)"
# Names that no caller may have, and whose they are.
RESERVED_TENANTS = {PUBLIC_TENANT: "the owner of public prefixes", TRIAL_TENANT: "the engine itself"}


class Namespace(NamedTuple):
    """An isolation boundary. Two requests share cached tokens only if all fields are equal.

    Fields are compared one by one and never joined, so `("a", "bc")` is not `("ab", "c")`.

    Attributes:
        model: fingerprint of the weights and of everything else that changes K and V.
        tenant: whose data this is.
        adapter: digest of the adapter's content, empty for the base model. A reloaded adapter has a new digest. What an
            invoked adapter computes is in the base model's namespace; see `Invocation`.
        salt: a name that isolates further, chosen by the caller.
        trunk: `SERIAL:TOKENS` of the public prefix, and its part, that come before all its tokens; empty for none.
    """

    model: str
    tenant: str = ""
    adapter: str = ""
    salt: str = ""
    trunk: str = ""

    def is_among(self, tenant: str | None, adapter: str | None, salt: str | None) -> bool:
        """Whether it has these names; None matches any. That of a public prefix has none that anybody could mean."""
        return (
            self.tenant != PUBLIC_TENANT
            and (tenant is None or tenant == self.tenant)
            and (adapter is None or adapter == self.adapter)
            and (salt is None or salt == self.salt)
        )

    @property
    def trunk_tokens(self) -> int:
        """Tokens of the public prefix before all of its own; 0 without one."""
        return int(self.trunk.rpartition(":")[2] or 0)

    @property
    def seed(self) -> int:
        """A 64-bit hash, for fingerprints that must differ between namespaces. It identifies nothing."""
        return _seed(self)


class PromptKey(NamedTuple):
    """A prompt as the cache knows it.

    Attributes:
        namespace: who shares it.
        tokens: little-endian uint32 bytes; those that an invoked adapter computes are marked, see `Invocation`.
    """

    namespace: Namespace
    tokens: bytes


@lru_cache(maxsize=1024)  # each request asks two or three times, and hashing takes 0.7 us
def _seed(namespace: Namespace) -> int:
    digest = xxhash.xxh3_64()
    # An empty trunk is left out, so that seeds do not depend on the field.
    for field in namespace if namespace.trunk else namespace[:-1]:
        data = field.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.intdigest()
