"""Sessions: the conversations of tenants, and the nodes that only one of them has used."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, OrderedDict
from collections.abc import Generator, Iterable, Iterator
from itertools import islice

from sortedcontainers import SortedList

from radixkv.api.awaits import Awaits
from radixkv.api.miss_reason import MissReason
from radixkv.cache.changes import Listener
from radixkv.cache.node import Node, Session
from radixkv.errors import require_invariant
from radixkv.namespace import PromptKey

MAX_SESSION_PROMPT_BYTES = 64 * 2**20
"""Memory of the prompts that a server with tiers remembers, to load them ahead: 160 prompts of 100,000 tokens."""

_SESSION_BYTES = 1024  # memory of a remembered session besides the tokens of its prompt; measured: 940

_SHARE_OF_WAIT = 0.5  # the next turn is prepared for after this share of the usual wait
_MAX_EXAMINED = 1024  # sessions in one slice, which takes 0.2 ms

_require = functools.partial(require_invariant, "sessions")


class Sessions(Listener):
    """The sessions that have a cached node of their own, an open lease, or a remembered prompt.

        lease of session a    [ system prompt ][ turn 1 ][ turn 2 ]
        lease of session b    [ system prompt ][ other turn ]
        `Node.session`           None             a          a   ;   b

    A node belongs to the session that published it, until a lease of another session, or of none, uses it, until a hint
    says that several sessions will use it, or until the session ends. The nodes above it belong to the same session or
    to none, because every lease that used this node used them as well. So a lease that finds a path visits only the
    nodes that change their owner.

    With `max_prompt_bytes`, the last prompts of the sessions used most recently are remembered as well, even after all
    of their nodes were evicted.

    Memory: one set entry per node, and `max_prompt_bytes`.

    Args:
        max_prompt_bytes: memory of the prompts to remember, of which each takes 1 KiB in addition to its tokens.

    Attributes:
        remembers_prompts: whether `max_prompt_bytes` is more than 0.
        num_nodes: nodes that belong to a session.
    """

    def __init__(self, max_prompt_bytes: int = 0) -> None:
        self.remembers_prompts = max_prompt_bytes > 0
        self._max_prompt_bytes = max_prompt_bytes
        self._num_prompt_bytes = 0
        self._returns = SortedList()  # of (expected_s, serial, session); serials are distinct
        self._serials = itertools.count()
        self._remembered: OrderedDict[Session, None] = OrderedDict()  # those with a prompt, the oldest prompt first
        self._sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()  # the one used last is last
        self._num_sessions_of: Counter[str] = Counter()  # by tenant
        self.num_nodes = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def num_of(self, tenant: str) -> int:
        """Count the sessions of a tenant."""
        return self._num_sessions_of[tenant]

    def latest(self, max_sessions: int, tenant: str | None = None) -> list[Session]:
        """List up to `max_sessions` sessions of a tenant, or of all tenants (None), the most recently used first.

        Complexity: O(sessions) at most; for all tenants O(max_sessions).
        """
        latest = reversed(self._sessions.values())
        return list(islice((each for each in latest if tenant in (None, each.tenant)), max_sessions))

    def get(self, tenant: str, session_id: str) -> Session | None:
        """Return a session; None if it is unknown."""
        return self._sessions.get((tenant, session_id))

    def enter(self, tenant: str, session_id: str, now_s: float) -> Session:
        """Return the session of a new lease."""
        session = self._sessions.get((tenant, session_id))
        if session is None:
            session = self._sessions[tenant, session_id] = Session(tenant, session_id)
            self._num_sessions_of[tenant] += 1
        session.num_leases += 1
        if session.awaits is Awaits.TOOL:
            wait_s = now_s - session.last_used_s
            average_s = session.tool_wait_s
            session.tool_wait_s = wait_s if average_s is None else (average_s + wait_s) / 2
        self.set_awaits(session, Awaits.UNKNOWN)
        self._note_use(session, now_s)
        return session

    def enter_prefetch(self, tenant: str, session_id: str, node: Node | None) -> Session | None:
        """Return the session of a new lease that only loads blocks, and does not count as a use by the session.

        Args:
            tenant: the tenant of the lease.
            session_id: the session whose next turn is prepared for; empty for none.
            node: the deepest node that shares a token with the prompt; None if none does.

        Returns:
            The session with this id, or else the one to which `node` belongs; None if there is neither.
        """
        session = self._sessions.get((tenant, session_id))
        if session is None and node is not None:
            session = node.session
        if session is not None:
            session.num_leases += 1
        return session

    def leave_prefetch(self, session: Session) -> None:
        """Note that a lease of `enter_prefetch` was closed."""
        session.num_leases -= 1
        self._drop_if_unused(session)

    def leave(self, session: Session, awaits: Awaits, now_s: float, prompt: PromptKey | None) -> None:
        """Note that a lease of a session was closed; `prompt` is its prompt with the generated tokens, if known."""
        session.num_leases -= 1
        if not session.has_ended:
            self._note_use(session, now_s)
            if prompt is not None:
                self._remember(session, prompt)
            self.set_awaits(session, awaits)
            self._drop_if_unused(session)

    def set_awaits(self, session: Session, awaits: Awaits) -> None:
        """Set what a session has been waiting for since its last use.

        Its next turn is expected only if the session waits for a tool and its prompt is remembered.
        """
        session.awaits = awaits
        expected_s = None
        if awaits is Awaits.TOOL and session.prompt is not None:
            expected_s = session.last_used_s + _SHARE_OF_WAIT * session.usual_wait_s
        self.expect(session, expected_s)

    def _note_use(self, session: Session, now_s: float) -> None:
        session.last_used_s = now_s
        self._sessions.move_to_end((session.tenant, session.session_id))

    def _remember(self, session: Session, prompt: PromptKey) -> None:
        self._forget_prompt(session)
        if _num_bytes(prompt) <= self._max_prompt_bytes:
            session.prompt = prompt
            self._remembered[session] = None
            self._num_prompt_bytes += _num_bytes(prompt)
        while self._num_prompt_bytes > self._max_prompt_bytes:
            oldest = next(iter(self._remembered))
            self._forget_prompt(oldest)
            self._drop_if_unused(oldest)

    def _forget_prompt(self, session: Session) -> None:
        if session.prompt is not None:
            self._num_prompt_bytes -= _num_bytes(session.prompt)
            session.prompt = None
            self.expect(session, None)
            del self._remembered[session]

    def expect(self, session: Session, when_s: float | None) -> None:
        """Set the time at which to prepare for the next turn of a session; None if it is not prepared for."""
        if session.return_entry is not None:
            self._returns.remove(session.return_entry)
        session.return_entry = None if when_s is None else (when_s, next(self._serials), session)
        if session.return_entry is not None:
            self._returns.add(session.return_entry)

    @property
    def next_return_s(self) -> float | None:
        """The earliest time at which to prepare for the next turn of any session; None if no turn is expected."""
        return self._returns[0][0] if self._returns else None

    def pop_returning(self, now_s: float, max_sessions: int) -> list[Session]:
        """Return the sessions whose next turn should be prepared for by now, and stop expecting these turns."""
        due: list[Session] = []
        while self._returns and self._returns[0][0] <= now_s and len(due) < max_sessions:
            due.append(self._returns[0][2])
            self.expect(due[-1], None)
        return due

    def expect_none_in_slices(self, tenant: str, adapter: str | None, salt: str | None) -> Generator[None, None, None]:
        """Expect no next turn of the sessions of a tenant whose last prompt is in a namespace with these names.

        Works in slices of `_MAX_EXAMINED` sessions that end with a `yield`. None matches any name.
        """
        for index, entry in enumerate(list(self._returns)):
            session = entry[2]
            if session.prompt is not None and session.prompt.namespace.is_among(tenant, adapter, salt):
                self.expect(session, None)
            if index % _MAX_EXAMINED == _MAX_EXAMINED - 1:
                yield

    def forget_prompts_in_slices(
        self, tenant: str | None, adapter: str | None, salt: str | None
    ) -> Generator[None, None, None]:
        """Forget the prompts of namespaces with these names, None for any.

        Works in slices of `_MAX_EXAMINED` sessions that end with a `yield`.
        """
        for index, session in enumerate(list(self._remembered)):
            if session.prompt is not None and session.prompt.namespace.is_among(tenant, adapter, salt):
                self._forget_prompt(session)
                self._drop_if_unused(session)
            if index % _MAX_EXAMINED == _MAX_EXAMINED - 1:
                yield

    def record_use(self, node: Node | None, session: Session | None) -> None:
        """Note that a lease of a session, or of none, has used all tokens of the path to `node`.

        Complexity: O(nodes that belonged to another session).
        """
        while node is not None and node.session is not None and node.session is not session:
            self._disown(node)
            node = node.parent

    def add_leaf(self, leaf: Node, session: Session | None) -> None:
        """Give a new leaf to the session that published it; None for no session."""
        if session is not None and not session.has_ended:
            self._own(leaf, session)
        self.record_use(leaf.parent, session)

    def end(self, session: Session) -> list[Node]:
        """Forget a session, and return the nodes that only it has used. Leases of it that are still open continue."""
        nodes = list(session.nodes)
        session.has_ended = True
        for node in nodes:
            self._disown(node)
        self._forget_prompt(session)
        self._forget(session)
        return nodes

    def split(self, lower: Node, last_used_s: float, now_s: float) -> None:
        """Give the upper half to the session of the lower half. `record_use` is called for that half afterwards."""
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
            _require(
                node.session is not None and node in node.session.nodes, "a session does not know a node of its own"
            )
        _require(sum(len(session.nodes) for session in self) == len(owned), "a session has a node outside every tree")
        _require(self.num_nodes == len(owned), "the count of nodes is wrong")
        _require(all(each.nodes or each.num_leases or each.prompt for each in self), "an unused session is kept")
        num_bytes = sum(_num_bytes(each.prompt) for each in self if each.prompt is not None)
        return_entries = [each.return_entry for each in self if each.return_entry is not None]
        _require(sorted(return_entries) == list(self._returns), "an expected return is wrong")
        _require(num_bytes == self._num_prompt_bytes, "the size of the remembered prompts is wrong")

    def _own(self, node: Node, session: Session) -> None:
        node.session = session
        session.nodes.add(node)
        self.num_nodes += 1

    def _disown(self, node: Node) -> None:
        session = node.session
        if session is not None:
            node.session = None
            session.nodes.discard(node)
            self.num_nodes -= 1
            self._drop_if_unused(session)

    def _drop_if_unused(self, session: Session) -> None:
        if not session.nodes and not session.num_leases and session.prompt is None and not session.has_ended:
            self._forget(session)

    def _forget(self, session: Session) -> None:
        del self._sessions[session.tenant, session.session_id]
        self._num_sessions_of[session.tenant] -= 1
        if not self._num_sessions_of[session.tenant]:
            del self._num_sessions_of[session.tenant]


def _num_bytes(prompt: PromptKey) -> int:
    """Return the memory that a remembered prompt takes, with its session."""
    return len(prompt.tokens) + _SESSION_BYTES
