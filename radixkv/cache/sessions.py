"""Sessions: the conversations of tenants, and the nodes that only one of them has used."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

from radixkv.api.awaits import Awaits
from radixkv.api.miss_reason import MissReason
from radixkv.cache.changes import Listener
from radixkv.cache.node import Node
from radixkv.errors import require_invariant

_require = functools.partial(require_invariant, "sessions")


class Session:
    """A conversation of one tenant.

    Attributes:
        tenant, session_id: its names. The tenant chooses the id.
        nodes: the nodes that only this session has used.
        num_leases: its open leases.
        last_used_s: when a lease of it last began or ended.
        awaits: what it waits for since its last lease was closed.
        has_ended: whether the tenant has ended it.
    """

    __slots__ = ("awaits", "has_ended", "last_used_s", "nodes", "num_leases", "session_id", "tenant")

    def __init__(self, tenant: str, session_id: str) -> None:
        self.tenant = tenant
        self.session_id = session_id
        self.nodes: set[Node] = set()
        self.num_leases = 0
        self.last_used_s = 0.0
        self.awaits = Awaits.UNKNOWN
        self.has_ended = False

    @property
    def num_blocks(self) -> int:
        """Blocks of the nodes that only this session has used. Complexity: O(nodes)."""
        return sum(node.num_blocks for node in self.nodes)

    @property
    def ends(self) -> list[Node]:
        """The nodes in which its prompts end, as far as no other session has used them. Complexity: O(nodes)."""
        return [node for node in self.nodes if not any(child in self.nodes for child in (node.children or {}).values())]


class Sessions(Listener):
    """The sessions that have a cached node of their own or an open lease.

        lease of session a    [ system prompt ][ turn 1 ][ turn 2 ]
        lease of session b    [ system prompt ][ other turn ]
        `Node.session`           None             a          a   ;   b

    A node belongs to the session that published it, until a lease of another session, or of none, uses it. The nodes
    above it have been used by the same leases, so they belong to the same session or to none, and a lease that finds a
    path visits only the nodes that change their owner.

    Memory: one set entry per node, so sessions are bounded by the blocks of the pool and by the open leases.
    """

    def __init__(self) -> None:
        self._by_tenant: dict[str, dict[str, Session]] = {}
        self._num_nodes = 0

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def __iter__(self) -> Iterator[Session]:
        for sessions in self._by_tenant.values():
            yield from sessions.values()

    def of(self, tenant: str) -> list[Session]:
        """List the sessions of a tenant. Complexity: O(sessions of the tenant)."""
        return list(self._by_tenant.get(tenant, {}).values())

    def get(self, tenant: str, session_id: str) -> Session | None:
        """Return a session; None if nothing of it is cached and it has no open lease."""
        return self._by_tenant.get(tenant, {}).get(session_id)

    def enter(self, tenant: str, session_id: str, now_s: float) -> Session:
        """Return the session of a new lease."""
        sessions = self._by_tenant.setdefault(tenant, {})
        session = sessions.get(session_id)
        if session is None:
            session = sessions[session_id] = Session(tenant, session_id)
        session.num_leases += 1
        session.last_used_s = now_s
        session.awaits = Awaits.UNKNOWN
        return session

    def leave(self, session: Session, awaits: Awaits, now_s: float) -> None:
        """Note that a lease of a session was closed."""
        session.num_leases -= 1
        session.last_used_s = now_s
        session.awaits = awaits
        self._drop_if_unused(session)

    def found(self, node: Node | None, session: Session | None) -> None:
        """Note that a lease of a session, or of none, has used all tokens of the path to `node`.

        Complexity: O(nodes that belonged to another session).
        """
        if self._num_nodes:
            while node is not None and node.session is not None and node.session is not session:
                self._disown(node)
                node = node.parent

    def published(self, leaf: Node, session: Session | None) -> None:
        """Give a new leaf to the session that published it; None for no session."""
        if session is not None and not session.has_ended:
            self._own(leaf, session)
        self.found(leaf.parent, session)

    def end(self, session: Session) -> list[Node]:
        """Forget a session, and return the nodes that only it has used. Leases of it that are still open continue."""
        nodes = list(session.nodes)
        session.has_ended = True
        for node in nodes:
            self._disown(node)
        self._forget(session)
        return nodes

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """Give the upper half to the session of the lower half; `found` is called with it afterwards."""
        self.cut(lower)

    def cut(self, lower: Node) -> None:
        """Give the upper half to the session of the lower half."""
        if lower.session is not None:
            assert lower.parent is not None
            self._own(lower.parent, lower.session)

    def joined(self, uppers: list[Node], lower: Node) -> None:
        """Forget the nodes that no longer exist. They belonged to the session of `lower`."""
        for upper in uppers:
            self._disown(upper)

    def evicted(self, leaf: Node, num_blocks: int, fingerprint: int, reason: MissReason, now_s: float) -> None:
        """Forget a leaf that is evicted as a whole."""
        if num_blocks == leaf.num_blocks:
            self._disown(leaf)

    def purged(self, node: Node) -> None:
        """Forget a node."""
        self._disown(node)

    def check(self, nodes: Iterable[Node]) -> None:
        """Compare the sessions with the nodes of the trees. Complexity: O(nodes).

        Raises:
            InvariantViolation: the message names the inconsistency.
        """
        owned = [node for node in nodes if node.session is not None]
        for node in owned:
            above = None if node.parent is None else node.parent.session
            _require(above in (None, node.session), "a node belongs to another session than the node above it")
            _require(node.session is not None and node in node.session.nodes, "a session does not know a node of its own")
        _require(sum(len(session.nodes) for session in self) == len(owned), "a session has a node outside every tree")
        _require(self._num_nodes == len(owned), "the count of nodes is wrong")
        _require(all(session.nodes or session.num_leases for session in self), "an unused session is kept")

    def _own(self, node: Node, session: Session) -> None:
        node.session = session
        session.nodes.add(node)
        self._num_nodes += 1

    def _disown(self, node: Node) -> None:
        session = node.session
        if session is not None:
            node.session = None
            session.nodes.discard(node)
            self._num_nodes -= 1
            self._drop_if_unused(session)

    def _drop_if_unused(self, session: Session) -> None:
        if not session.nodes and not session.num_leases and not session.has_ended:
            self._forget(session)

    def _forget(self, session: Session) -> None:
        sessions = self._by_tenant[session.tenant]
        del sessions[session.session_id]
        if not sessions:
            del self._by_tenant[session.tenant]
