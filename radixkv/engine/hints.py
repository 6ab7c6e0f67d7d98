"""Applies the hints of callers to the cache and the tiers, and reports the outcome of each action."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from radixkv.api.awaits import Awaits
from radixkv.api.hints import MAX_DIRECTIVES, HintAction, HintOutcome, HintStatus
from radixkv.api.retention import MAX_PRIORITY, Grant, Retention
from radixkv.cache.node import Node, Session, path_to
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.purge import all_slices
from radixkv.errors import InvalidRequest, UnknownAdapter
from radixkv.namespace import Namespace, PromptKey
from radixkv.tokens import TOKEN_BYTES

Prefetch = Callable[[Namespace, bytes, str], int]
"""Starts to load a prompt of a session, or of none (""), from the tiers; returns the number of tokens to load."""

DigestOf = Callable[[str], str]
"""Returns the digest of the adapter to which a name maps; raises UnknownAdapter."""

_AWAITS = {each.name.lower(): each for each in Awaits}
_RANGE_FIELDS = ("start", "end")
_TTL_FIELDS = ("ttl_seconds", "duration")
_RETAIN_FIELDS = ("priority", *_TTL_FIELDS, "renew", *_RANGE_FIELDS)
_NAMESPACE_FIELDS = ("adapter", "salt")
_MAX_ENDS = 64  # maximum number of branches of a session that one action changes
_MAX_NUMBER = 2**53  # whole numbers above it are not exact in JSON
_NO_TIERS = "there are no tiers to save to; kv.release frees the blocks"
_TYPE_NAMES = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", list: "a list"}


class Refusal(Exception):
    """An action is refused. The message is the reason in its outcome."""


class NothingCached(Refusal):
    """An action is refused because nothing that it addresses is cached."""


class _AddressedTokens(NamedTuple):
    """Tokens that an action addresses.

    Attributes:
        namespace, tokens: a prompt, in the form of the cache.
        start: the first token of it that is addressed.
    """

    namespace: Namespace
    tokens: bytes
    start: int = 0


class _Names(NamedTuple):
    """The names of the namespaces that an action addresses.

    Attributes:
        digest: digest of the adapter; None for any adapter, empty for the base model.
        salt: the salt; None for any.
    """

    digest: str | None
    salt: str | None


class HintApplier:
    """Applies the actions of hints, on the engine's thread.

    An action addresses prompts of its caller's tenant only: the prompt that came with it, in its caller's namespace,
    the nodes that a session of its tenant alone has used, or the tenant's namespaces of an adapter or a salt. So it can
    neither read nor move the blocks of another tenant, and its retentions are bounded as all others are.

    Args:
        cache: the radix trees.
        retain: sets the priority of a range on the device and in the tiers; also an attribute.
        prefetch: starts to load a prompt; None without tiers.

    Attributes:
        counts: actions so far, by type and status; see `AgentStats.hints`.
    """

    def __init__(
        self,
        cache: PrefixCache,
        retain: Callable[[Namespace, bytes, Retention], Grant],
        prefetch: Prefetch | None,
    ) -> None:
        self.retain = retain
        self.counts: Counter[tuple[str, str]] = Counter()
        self._cache = cache
        self._prefetch = prefetch
        # An action returns the number of tokens on which it had an effect, and why these are not all that it addresses;
        # empty if they are.
        self._actions: Mapping[str, Callable[[_Payload, str, PromptKey | None], tuple[int, str]]] = {
            "kv.retain": self._retain_ranges,
            "kv.pin": self._pin,
            "kv.prefetch": self._prefetch_prompt,
            "kv.demote": partial(self._drop, evicts=True),
            "kv.release": partial(self._drop, evicts=False),
            "kv.evict": partial(self._drop, evicts=False),
            "kv.share": self._share,
            "kv.await": self._await,
        }
        self._namespace_actions: Mapping[
            str, Callable[[_Payload, str, _Names], Generator[None, None, tuple[int, str]]]
        ] = {
            "kv.retain": self._retain_namespaces,
            "kv.pin": self._pin_namespaces,
            "kv.demote": partial(self._drop_namespaces, evicts=True),
            "kv.release": partial(self._drop_namespaces, evicts=False),
            "kv.evict": partial(self._drop_namespaces, evicts=False),
        }

    def apply(self, actions: Sequence[HintAction], tenant: str, prompt: PromptKey | None) -> tuple[HintOutcome, ...]:
        """Apply actions in order.

        Args:
            actions: the actions.
            tenant: the tenant of the call.
            prompt: the prompt of the same call; None without one.

        Returns:
            One outcome for each action. Those that address an adapter or a salt are refused; see `apply_in_slices`.
        """
        return all_slices(self.apply_in_slices(actions, tenant, prompt, None))

    def apply_in_slices(
        self, actions: Sequence[HintAction], tenant: str, prompt: PromptKey | None, digest_of: DigestOf | None
    ) -> Generator[None, None, tuple[HintOutcome, ...]]:
        """Apply actions in order, in slices that end with a `yield` and between which steps may run.

        Args:
            actions, tenant, prompt: as in `apply`.
            digest_of: resolves the names of adapters; None to refuse actions that address an adapter or a salt. Without
                such actions, there is one slice.

        Returns:
            One outcome for each action.
        """
        outcomes = []
        for action in actions:
            outcome = yield from self._apply(action, tenant, prompt, digest_of)
            kind = action.action_type if action.action_type in self._actions else "other"
            self.counts[kind, outcome.status.name.lower()] += 1
            outcomes.append(outcome)
        return tuple(outcomes)

    def _apply(
        self, action: HintAction, tenant: str, prompt: PromptKey | None, digest_of: DigestOf | None
    ) -> Generator[None, None, HintOutcome]:
        try:
            perform = self._actions.get(action.action_type)
            if perform is None:
                raise Refusal(f"action_type: expected one of {', '.join(self._actions)}, got {action.action_type!r}")
            if action.action_version.split(".")[0] not in ("0", "1"):
                raise Refusal(f"action_version: expected 1.x or 0.x, got {action.action_version!r}")
            payload = _Payload(action.payload)
            names = self._addressed_names(payload, action.action_type, digest_of)
            if names is None:
                num_tokens, reason = perform(payload, tenant, prompt)
            else:
                num_tokens, reason = yield from self._namespace_actions[action.action_type](payload, tenant, names)
            if not num_tokens and not reason:
                raise NothingCached("nothing that it addresses is cached")
        except Refusal as refusal:
            is_missing = isinstance(refusal, NothingCached)
            return HintOutcome(action.action_id, HintStatus.REFUSED, str(refusal), is_missing=is_missing)
        except InvalidRequest as error:
            return HintOutcome(action.action_id, HintStatus.REFUSED, f"payload: {error}")
        if not num_tokens:
            return HintOutcome(action.action_id, HintStatus.REFUSED, reason)
        status = HintStatus.CLIPPED if reason else HintStatus.ACCEPTED
        return HintOutcome(action.action_id, status, reason, num_tokens)

    def _addressed_names(self, payload: _Payload, action_type: str, digest_of: DigestOf | None) -> _Names | None:
        """Return the names of the namespaces that an action addresses; None if it addresses a prompt or a session."""
        adapter, salt = payload.get("adapter", str), payload.get("salt", str)
        if adapter is None and salt is None:
            return None
        field = "payload.salt" if adapter is None else "payload.adapter"
        if action_type not in self._namespace_actions:
            raise Refusal(f"{field}: {action_type} addresses a prompt or a session")
        if digest_of is None:
            raise Refusal(f"{field}: the hints of a request address its prompt or a session; use the method Hint")
        try:
            digest = None if adapter is None else digest_of(adapter)
        except UnknownAdapter as error:
            raise Refusal(f"payload.{error}") from None
        if digest and self._cache.marks.has(digest):
            raise Refusal("payload.adapter: it is invoked in prompts of the base model, so it has no namespace")
        return _Names(digest, salt)

    def _retain_ranges(self, payload: _Payload, tenant: str, prompt: PromptKey | None) -> tuple[int, str]:
        payload.allow("session_id", "scope", "directives", *_RETAIN_FIELDS)
        directives = payload.get("directives", list)
        if directives is None:
            return self._retain_addressed(payload, tenant, prompt)
        if len(directives) > MAX_DIRECTIVES:
            raise Refusal(f"payload.directives: expected at most {MAX_DIRECTIVES}, got {len(directives)}")
        session_id = payload.get("session_id", str)
        num_tokens, reasons = 0, []
        for index, directive in enumerate(directives):
            if not isinstance(directive, Mapping):
                raise Refusal(f"payload.directives[{index}]: expected an object, got {type(directive).__name__}")
            fields = dict(directive)
            if session_id is not None:
                fields["session_id"] = session_id
            directive_payload = _Payload(fields, f"payload.directives[{index}]")
            directive_payload.allow("session_id", "covers_output", *_RETAIN_FIELDS)
            if directive_payload.get("covers_output", bool):
                raise Refusal(
                    f"payload.directives[{index}].covers_output: expected false, since a retention covers the prompt"
                )
            try:
                num_retained, reason = self._retain_addressed(directive_payload, tenant, prompt)
            except (Refusal, InvalidRequest) as error:
                if not num_tokens:
                    raise
                reasons.append(str(error))  # the directives before it had their effect
                break
            num_tokens += num_retained
            if reason:
                reasons.append(reason)
        return num_tokens, "; ".join(dict.fromkeys(reasons))

    def _pin(self, payload: _Payload, tenant: str, prompt: PromptKey | None) -> tuple[int, str]:
        payload.allow("session_id", *_TTL_FIELDS, *_RANGE_FIELDS)
        payload.require_ttl()
        return self._retain_addressed(payload, tenant, prompt, MAX_PRIORITY)

    def _retain_addressed(
        self, payload: _Payload, tenant: str, prompt: PromptKey | None, priority: int | None = None
    ) -> tuple[int, str]:
        if priority is None:
            priority = payload.priority
        total = Grant(0, 0, 0)
        ranges, reason = self._ranges(payload, tenant, prompt)
        reasons = [reason] if reason else []
        for each in ranges:
            start = max(each.start, payload.get("start", int) or 0)
            retention = Retention(
                priority, payload.ttl_s, start, payload.get("end", int), bool(payload.get("renew", bool))
            )
            try:
                total = total.joined(self.retain(each.namespace, each.tokens, retention))
            except InvalidRequest as error:
                if not total.granted_tokens:
                    raise
                reasons.append(str(error))  # the ranges before it had their effect
                break
        if total.refused_tokens:
            reasons.append(_over_share_reason(total.refused_tokens))
        if total.uncached_tokens and (total.granted_tokens or total.refused_tokens):
            reasons.append(f"{total.uncached_tokens} tokens are not cached")
        return total.granted_tokens, "; ".join(reasons)

    def _retain_namespaces(
        self, payload: _Payload, tenant: str, names: _Names
    ) -> Generator[None, None, tuple[int, str]]:
        payload.allow(*_NAMESPACE_FIELDS, "priority", *_TTL_FIELDS, "renew")
        retention = Retention(payload.priority, payload.ttl_s, renew=bool(payload.get("renew", bool)))
        return (yield from self._retain_in_slices(tenant, names, retention))

    def _pin_namespaces(self, payload: _Payload, tenant: str, names: _Names) -> Generator[None, None, tuple[int, str]]:
        payload.allow(*_NAMESPACE_FIELDS, *_TTL_FIELDS)
        return (yield from self._retain_in_slices(tenant, names, Retention(MAX_PRIORITY, payload.require_ttl())))

    def _retain_in_slices(
        self, tenant: str, names: _Names, retention: Retention
    ) -> Generator[None, None, tuple[int, str]]:
        grant = yield from self._cache.retain_in_slices(tenant, retention, adapter=names.digest, salt=names.salt)
        return grant.granted_tokens, _over_share_reason(grant.refused_tokens) if grant.refused_tokens else ""

    def _prefetch_prompt(self, payload: _Payload, tenant: str, prompt: PromptKey | None) -> tuple[int, str]:
        payload.allow("session_id")
        if self._prefetch is None:
            raise Refusal("there are no tiers to load from")
        session = self._session(payload, tenant)
        if session is not None:
            if session.prompt is None:
                raise Refusal("the last prompt of the session is not known any more")
            prompt = session.prompt
        num_tokens = self._prefetch(*_require_prompt(prompt), "" if session is None else session.session_id)
        return (
            num_tokens,
            "" if num_tokens else "no tier has more of the prompt than the device, or too much is loading",
        )

    def _drop(self, payload: _Payload, tenant: str, prompt: PromptKey | None, *, evicts: bool) -> tuple[int, str]:
        """Drop the addressed tokens from the device. `evicts`: whether the tiers save them."""
        if evicts and self._prefetch is None:
            raise Refusal(_NO_TIERS)
        payload.allow("session_id", "start")
        start = payload.get("start", int) or 0
        session = self._session(payload, tenant)
        if session is not None:
            if start:
                raise Refusal("payload.start: expected none with a session, of which everything is dropped")
            self._cache.sessions.expect(session, None)  # so that its prompt is not prefetched again for its next turn
            block_size = self._cache.block_size
            num_dropped = self._cache.drop_session(session, evicts=evicts) * block_size
            num_kept = session.num_blocks * block_size
        else:
            num_dropped, num_kept = self._cache.drop(*_require_prompt(prompt), start, evicts=evicts)
        reason = f"{num_kept} tokens stay, because requests use them, or because one hint cannot drop so many segments"
        return num_dropped, reason if num_kept else ""

    def _drop_namespaces(
        self, payload: _Payload, tenant: str, names: _Names, *, evicts: bool
    ) -> Generator[None, None, tuple[int, str]]:
        """Drop the addressed namespaces from the device. `evicts`: whether the tiers save them."""
        if evicts and self._prefetch is None:
            raise Refusal(_NO_TIERS)
        payload.allow(*_NAMESPACE_FIELDS)
        num_dropped, are_any_left = yield from self._cache.drop_in_slices(
            tenant, adapter=names.digest, salt=names.salt, evicts=evicts
        )
        return num_dropped, "some tokens stay, because requests use them" if are_any_left else ""

    def _share(self, payload: _Payload, tenant: str, prompt: PromptKey | None) -> tuple[int, str]:
        payload.allow("session_id", "end")
        end = payload.get("end", int)
        session = self._session(payload, tenant)
        if session is not None:
            if end is not None:
                raise Refusal("payload.end: expected none with a session, of which everything is shared")
            num_tokens = self._cache.share_session(session)
            return num_tokens, "the session has too many prompts; repeat the hint" if session.nodes else ""
        namespace, tokens = _require_prompt(prompt)
        num_prompt_tokens = len(tokens) // TOKEN_BYTES
        if end is not None and not 0 < end <= num_prompt_tokens:
            raise Refusal(f"payload.end: expected 1 to {num_prompt_tokens}, got {end}")
        num_addressed = num_prompt_tokens if end is None else end
        num_shared = self._cache.share(namespace, tokens[: num_addressed * TOKEN_BYTES])
        is_clipped = 0 < num_shared < num_addressed
        return num_shared, f"{num_addressed - num_shared} tokens are not cached" if is_clipped else ""

    def _await(self, payload: _Payload, tenant: str, prompt: PromptKey | None) -> tuple[int, str]:
        payload.allow("session_id", "awaits")
        name = payload.get("awaits", str)
        if name not in _AWAITS:
            raise Refusal(f"payload.awaits: expected one of {', '.join(_AWAITS)}, got {name!r}")
        awaits = _AWAITS[name]
        session = self._session(payload, tenant)
        if session is not None:
            self._cache.sessions.set_awaits(session, awaits)
        ranges, reason = self._ranges(payload, tenant, prompt)
        return sum(self._cache.set_awaits(each.namespace, each.tokens, awaits, each.start) for each in ranges), reason

    def _session(self, payload: _Payload, tenant: str) -> Session | None:
        """Return the session that an action addresses; None if it addresses a prompt."""
        session_id = payload.get("session_id", str)
        if session_id is None:
            return None
        session = self._cache.sessions.get(tenant, session_id)
        if session is None:
            raise NothingCached("payload.session_id: no such session of this tenant is cached")
        return session

    def _ranges(self, payload: _Payload, tenant: str, prompt: PromptKey | None) -> tuple[list[_AddressedTokens], str]:
        """Return the tokens that an action addresses, and why these are not all; empty if they are."""
        session = self._session(payload, tenant)
        if session is None:
            return [_AddressedTokens(*_require_prompt(prompt))], ""
        ends = session.ends
        reason = f"only {_MAX_ENDS} of the session's {len(ends)} branches are changed" if len(ends) > _MAX_ENDS else ""
        return [self._own_range(session, node) for node in ends[:_MAX_ENDS]], reason

    def _own_range(self, session: Session, end_node: Node) -> _AddressedTokens:
        """Return the prompt up to a node, addressed from the first token that only this session has used."""
        path = path_to(end_node)
        root = path[0].parent
        tokens = (b"" if root is None else root.tokens) + b"".join(node.tokens for node in path)
        first_own = next(node for node in path if node.session is session)
        namespace = end_node.owner.namespace._replace(public_prefix="")
        return _AddressedTokens(namespace, tokens, first_own.start_bytes // TOKEN_BYTES)


class _Payload:
    """The payload of an action, whose fields are read with their types."""

    def __init__(self, fields: Mapping[str, Any], name: str = "payload") -> None:
        self.name = name
        self._fields = fields

    def allow(self, *names: str) -> None:
        """Refuse fields with other names."""
        unknown = next((name for name in self._fields if name not in names), None)
        if unknown is not None:
            raise Refusal(f"{self.name}.{unknown[:64]}: expected one of {', '.join(names)}")

    def get(self, name: str, kind: type) -> Any:
        """Return a field; None if it is absent or null. JSON does not distinguish 3.0 from 3."""
        value = self._fields.get(name)
        if value is None:
            return None
        if kind in (int, float):
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_NUMBER
            if is_number and (kind is float or value == int(value)):
                return kind(value)
        elif isinstance(value, kind):
            return value
        raise Refusal(f"{self.name}.{name}: expected {_TYPE_NAMES[kind]}, got {str(value)[:64]}")

    @property
    def ttl_s(self) -> float | None:
        """The time to live: `ttl_seconds`, or else `duration`."""
        ttl_s: float | None = self.get("ttl_seconds", float)
        if ttl_s is None:
            ttl_s = self.get("duration", float)
        return ttl_s

    def require_ttl(self) -> float:
        """Return the time to live, which an action requires."""
        if self.ttl_s is None:
            raise Refusal("payload.ttl_seconds: it is required, because a pin must end")
        return self.ttl_s

    @property
    def priority(self) -> int:
        """The priority of a retention, which is required."""
        priority: int | None = self.get("priority", int)
        if priority is None:
            raise Refusal(f"{self.name}.priority: it is required, 0 to {MAX_PRIORITY}")
        return priority


def _over_share_reason(num_tokens: int) -> str:
    return f"{num_tokens} tokens exceed the share of the cache that may be retained"


def _require_prompt(prompt: PromptKey | None) -> PromptKey:
    if prompt is None:
        raise Refusal("payload: expected session_id, or a prompt in the request")
    return prompt
