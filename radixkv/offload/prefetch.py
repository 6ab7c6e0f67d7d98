"""Loads prompts from the tiers to the device before a request needs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future

from radixkv.api.caller import Caller
from radixkv.api.params import PrefillParams
from radixkv.api.result import PrefillResult
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.errors import CapacityError
from radixkv.namespace import Namespace
from radixkv.offload.offload import Offload
from radixkv.scheduling.request import Request
from radixkv.tokens import TOKEN_BYTES

_MAX_LOADING = 32  # prompts at a time
_MAX_TENANT_LOADING = 4
_MAX_WAIT_S = 600.0  # of a session that is still expected to return


class Prefetcher:
    """Loads the stored blocks of prompts, as for requests that compute nothing.

        begin ──▶ tiers load the blocks ──▶ ready: a lease takes blocks, they are filled and published, the lease closes

    A prefetch takes blocks that are free or can be evicted for its tenant, as a request would, but leaves
    one block for each running request; if there are too few, it is dropped.

    Args:
        cache: the radix trees.
        offload: the tiers.
        num_running: returns the number of running requests.

    Attributes:
        num_loaded_tokens: tokens that were loaded so far.
        num_dropped: prefetches that loaded nothing: too few blocks were available, no tier had the blocks any more, the
            session was no longer known, the namespace was purged, or the engine was closed.
    """

    def __init__(self, cache: PrefixCache, offload: Offload, num_running: Callable[[], int]) -> None:
        self.num_loaded_tokens = 0
        self.num_dropped = 0
        self._cache = cache
        self._offload = offload
        self._num_running = num_running
        self._loading: dict[Request, float | None] = {}  # with `prior_use_s` of `begin`
        # Prefetches that did not have to wait for the tiers, since their load had already ended.
        self._already_loaded: list[Request] = []

    def look_ahead(self, now_s: float) -> None:
        """Start to load the prompts of sessions that wait for a tool, when about half of their usual wait is over.

        A session is loaded only while nothing else is, into free blocks or into blocks whose contents are needed later
        than the session; see `PrefixCache.has_idle_blocks`. Whether it is loaded or not, it is examined again later,
        until ten minutes have passed: blocks may have become available for it, or its own may have been evicted.

        Complexity: O(1) while no return is due, otherwise a match and a hash of the prompt of one session.
        """
        sessions = self._cache.sessions
        if sessions.next_return_s is None or sessions.next_return_s > now_s or self._offload.is_loading:
            return
        for session in sessions.pop_returning(now_s, 1):
            assert session.prompt is not None, "only sessions with a prompt return"
            namespace, tokens = session.prompt
            cached_tokens = self._cache.match(namespace, tokens).cached_tokens
            num_blocks = (len(tokens) // TOKEN_BYTES - cached_tokens) // self._cache.block_size
            is_loading = any(
                each.tenant == session.tenant and each.params.session_id == session.session_id for each in self._loading
            )
            if num_blocks and not is_loading and self._cache.has_idle_blocks(num_blocks, session):
                self.begin(namespace, tokens, session.session_id, session.last_used_s)
            waited_s = now_s - session.last_used_s
            if waited_s < _MAX_WAIT_S:
                # The longer the session has waited, the less often it is examined.
                sessions.expect(session, now_s + max(1.0, waited_s / 4))

    def seconds_until_due(self, now_s: float) -> float | None:
        """Return the seconds until `look_ahead` has something to do; None if nothing is expected."""
        return_s = None if self._offload.is_loading else self._cache.sessions.next_return_s
        return None if return_s is None else max(0.0, return_s - now_s)

    def begin(self, namespace: Namespace, tokens: bytes, session_id: str = "", prior_use_s: float | None = None) -> int:
        """Start to load a prompt.

        Args:
            namespace, tokens: the prompt, in the form of the cache.
            session_id: the session that the prompt belongs to; empty for none.
            prior_use_s: when the session used the prompt last, if the prompt is loaded because the session will return;
                None if the prefetch counts as a use.

        Returns:
            The expected number of tokens to load; 0 if the tiers have no more of the prompt than the device, or if
            too many prompts are being loaded, in total or of this tenant.
        """
        num_of_tenant = sum(each.tenant == namespace.tenant for each in self._loading)
        if len(self._loading) >= _MAX_LOADING or num_of_tenant >= _MAX_TENANT_LOADING:
            return 0
        # A token is appended, because the last token of a prompt is always computed, and never loaded.
        extended_tokens = tokens + bytes(TOKEN_BYTES)
        cached_tokens = self._cache.match(namespace, extended_tokens).cached_tokens
        caller = Caller(namespace.tenant, namespace.adapter, namespace.salt)
        params = PrefillParams(extended_tokens, caller, session_id=session_id)
        request = Request(params, namespace, Future[PrefillResult](), time.monotonic(), is_prefetch=True)
        is_waiting = self._offload.begin(request)
        if not is_waiting and not self._offload.has_load(request):
            return 0
        self._loading[request] = prior_use_s
        if not is_waiting:
            self._already_loaded.append(request)
        # Until a shared store has answered, assume that it has the whole prompt.
        end = request.reuse.stored_upto or len(tokens) // TOKEN_BYTES
        return max(0, end - cached_tokens)

    def take(self, ready: list[Request]) -> list[Request]:
        """Fill the prompts among requests that no longer wait for the tiers. Returns the other requests."""
        if not self._loading:
            return ready
        already_loaded, self._already_loaded = self._already_loaded, []
        other_requests = []
        for request in (*already_loaded, *ready):
            if request in self._loading:
                self._fill(request)
            elif request not in already_loaded:
                other_requests.append(request)
        return other_requests

    def forget(self, tenant: str | None, adapter: str | None, salt: str | None) -> None:
        """Drop the prompts whose namespaces have these names, None for any."""
        for request in [each for each in self._loading if each.is_among(tenant, adapter, salt)]:
            self._drop(request)

    def close(self) -> None:
        """Drop all prompts that are being loaded."""
        self.forget(None, None, None)

    def _fill(self, request: Request) -> None:
        """Copy the loaded blocks of a prompt to the device, and publish them."""
        session_id = request.params.session_id
        has_ended = session_id and self._cache.sessions.get(request.tenant, session_id) is None
        if has_ended or not self._offload.has_load(request):
            self._drop(request)
            return
        try:
            lease = self._cache.lease(
                request.namespace,
                request.prompt_tokens[: request.reuse.stored_upto * TOKEN_BYTES],
                num_headroom_blocks=self._num_running(),
                is_prefetch=True,
                prior_use_s=self._loading[request],
                session_id=session_id,
            )
        except CapacityError:
            self._drop(request)
            return
        num_cached_tokens = lease.cached_tokens
        num_loaded_tokens = max(0, self._offload.fill(request, lease) - num_cached_tokens)
        self.num_loaded_tokens += num_loaded_tokens
        self.num_dropped += not num_loaded_tokens
        lease.close(is_used=False)
        self._offload.leave(request)
        del self._loading[request]

    def _drop(self, request: Request) -> None:
        self.num_dropped += 1
        self._offload.leave(request)
        self._loading.pop(request, None)
