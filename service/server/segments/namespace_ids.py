"""Numbers that tell namespaces apart and give nothing away."""

from __future__ import annotations

import hashlib
import secrets
from functools import lru_cache

from radixkv.namespace import Namespace

_ID_BYTES = 6  # a number that every language reads exactly


class NamespaceIds:
    """Makes the number of a namespace, with a secret of its own, so that a guessed salt can't be confirmed by it."""

    def __init__(self) -> None:
        secret = secrets.token_bytes(16)

        @lru_cache(maxsize=4096)
        def number(namespace: Namespace) -> int:
            digest = hashlib.blake2b(key=secret, digest_size=_ID_BYTES)
            for field in namespace:
                data = field.encode("utf-8", "surrogatepass")
                digest.update(len(data).to_bytes(8, "little"))
                digest.update(data)
            return int.from_bytes(digest.digest(), "little")

        self._number = number

    def of(self, namespace: Namespace) -> int:
        """Return the number of a namespace: 48 bits, equal for equal namespaces."""
        return self._number(namespace)
