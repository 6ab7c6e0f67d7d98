"""Purges the stores that no other server uses."""

from __future__ import annotations

from radixkv.cache.elsewhere.elsewhere import Elsewhere
from radixkv.engine.offload.deleter import Deleter
from radixkv.engine.offload.deletions import Deletion
from radixkv.engine.offload.saver import Saver
from radixkv.storage.tiers.block_key import BlockKeys


class OwnPurger:
    """Deletes what this server's own stores hold of namespaces: also what nobody finds there any more.

        on the shelf ── given up ──▶ the store is told, with what comes instead ──▶ gone
                                         └── kept, as there was room ──▶ deleted ──▶ gone

    Args:
        elsewhere: knows what is stored, and what is to be given up.
        saver: knows what stores were told to give up.
        deleter: deletes, and knows what was not deleted yet.
        keys: of the blocks.
    """

    def __init__(self, elsewhere: Elsewhere, saver: Saver, deleter: Deleter, keys: BlockKeys) -> None:
        self._elsewhere = elsewhere
        self._saver = saver
        self._deleter = deleter
        self._keys = keys

    def purge(self, tenant: str | None, adapter: str | None, salt: str | None) -> list[Deletion]:
        """Forget the namespaces with these names, None for any, on all shelves, and delete what own stores have.

        Complexity: O(namespaces + blocks of these + keys that stores have not given up yet).
        """
        found, scope = self._elsewhere.purge(tenant, adapter, salt), self._keys.scope(tenant, adapter, salt)
        deletions: list[Deletion] = []
        for name, keys in found.items():
            if not self._elsewhere.shelves[name].is_shared:
                leaving = filter(scope.has, (*self._saver.given_up(name), *self._deleter.unanswered(name)))
                keys = list(dict.fromkeys((*keys, *self._elsewhere.drop_given_up(name, scope.has), *leaving)))
                deletions.append(Deletion(name, self._deleter.delete(name, keys)))
        return deletions
