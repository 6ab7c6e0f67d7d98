"""Registration of public prefixes, which the engine computes once for all tenants."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from radixkv.api.caller import Caller
from radixkv.api.limits import Limits
from radixkv.api.params import PrefillParams
from radixkv.api.public_prefixes import PublicPrefixStatus
from radixkv.api.result import PrefillResult
from radixkv.cache.public_prefixes import PublicPrefix, PublicPrefixes
from radixkv.engine.adapters.adapters import Adapters
from radixkv.engine.inbox import EngineThread
from radixkv.errors import RadixKVError, StepFailed, UnknownPublicPrefix
from radixkv.namespace import PUBLIC_TENANT
from radixkv.scheduling.request import Request

_log = logging.getLogger(__name__)


class PublicPrefixRegistry:
    """The public prefixes of an engine. Its public methods may be called from any thread.

        register ─▶ registered in the cache ─▶ a request of its own computes it, like any other ─▶ all prompts match it
                                                          └ fails: it is unregistered

    Args:
        public: the prefixes in the cache; only the engine's thread uses them.
        limits: limits on prompts.
        adapters: maps names to digests, and keeps the adapter that a request uses.
        thread: runs functions on the engine's thread.
        submit: queues a request.
    """

    def __init__(
        self,
        public: PublicPrefixes,
        limits: Limits,
        adapters: Adapters,
        thread: EngineThread,
        submit: Callable[[Request], None],
    ) -> None:
        self._public = public
        self._limits = limits
        self._adapters = adapters
        self._thread = thread
        self._submit = submit

    def register(self, name: str, tokens: bytes, adapter: str = "") -> Future[PublicPrefixStatus]:
        """Register a prefix and compute it. The computation continues if the future is cancelled.

        Args:
            name: not in use by another prefix.
            tokens: little-endian uint32 bytes.
            adapter: the name of a loaded adapter; empty for the base model.

        Raises:
            InvalidRequest, PromptTooLong: the tokens are not a valid prompt.
            Draining, StepHangs, QueueFull: the engine accepts no more calls.
            Later, through the future: SwitchedOff, InvalidRequest, UnknownAdapter, OutOfBlocks, the errors of a
                prefill, and UnknownPublicPrefix if it was unregistered in the meantime.
        """
        self._limits.require_tokens(tokens)
        done: Future[PublicPrefixStatus] = Future()
        started = self._thread.call(lambda: self._start(name, tokens, adapter, done))
        started.add_done_callback(partial(self._report_start_error, done))
        return done

    def unregister(self, name: str) -> Future[PublicPrefixStatus]:
        """Stop prompts from matching a prefix. Its blocks are freed when the requests that use it have ended.

        The future raises UnknownPublicPrefix if no prefix has this name.
        """
        return self._thread.call(lambda: self._status(self._public.unregister(name)))

    def listing(self) -> Future[list[PublicPrefixStatus]]:
        """List the registered prefixes in the order of their registration."""
        return self._thread.call(lambda: [self._status(prefix) for prefix in self._public])

    def _start(self, name: str, tokens: bytes, adapter: str, done: Future[PublicPrefixStatus]) -> None:
        prompt = self._adapters.acquire(Caller(adapter=adapter), tokens)
        prefix = None
        try:
            model, digest = prompt.namespace.model, prompt.namespace.adapter
            invoked = "" if prompt.invocation is None else prompt.invocation.digest
            prefix = self._public.register(name, model, digest, prompt.key.tokens, invoked=invoked)
            computed: Future[PrefillResult] = Future()
            params = PrefillParams(tokens, Caller(PUBLIC_TENANT, adapter), request_id=f"public prefix {name}")
            request = prompt._replace(namespace=prefix.namespace, former=()).request(params, computed)
            computed.add_done_callback(partial(self._activate, prefix, request, done))
            self._submit(request)
        except BaseException:
            if prefix is not None:
                self._public.abandon(prefix)
            self._adapters.release(prompt.adapter)
            raise

    def _report_start_error(self, done: Future[PublicPrefixStatus], started: Future[None]) -> None:
        """Report why a prefix could not be registered."""
        error = self._thread.cancellation() if started.cancelled() else started.exception()
        if error is not None:
            _complete(done, error)

    def _activate(
        self,
        prefix: PublicPrefix,
        request: Request,
        done: Future[PublicPrefixStatus],
        computed: Future[PrefillResult],
    ) -> None:
        """Let prompts match a computed prefix, or abandon the prefix if its request failed.

        Called on the engine's thread after a success, on any thread after a failure.
        """
        error = self._thread.cancellation() if computed.cancelled() else computed.exception()
        if error is not None:
            self._thread.put(lambda: self._abandon(prefix, request))
            _complete(done, error)
            return
        try:
            self._public.activate(prefix)
        except UnknownPublicPrefix as unregistered:
            _complete(done, unregistered)
            return
        except RadixKVError as failure:
            self._public.abandon(prefix)
            _complete(done, StepFailed(f"public prefix: {failure}"))
            return
        _log.info("public prefix %s: %d tokens", prefix.name, prefix.num_tokens)
        _complete(done, self._status(prefix))

    def _abandon(self, prefix: PublicPrefix, request: Request) -> None:
        """Abandon a prefix when the request that computes it has ended; until then a step may write to its blocks."""
        if request.is_over:
            self._public.abandon(prefix)
        else:
            self._thread.put(lambda: self._abandon(prefix, request))

    def _status(self, prefix: PublicPrefix) -> PublicPrefixStatus:
        return PublicPrefixStatus(
            prefix.name,
            prefix.adapter,
            prefix.num_tokens,
            prefix.num_blocks,
            is_computed=prefix.lease is not None,
            num_users=prefix.num_users,
            num_uses=prefix.num_uses,
        )


def _complete(done: Future[PublicPrefixStatus], outcome: PublicPrefixStatus | BaseException) -> None:
    if not done.set_running_or_notify_cancel():
        return  # the caller cancelled the future
    if isinstance(outcome, BaseException):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)
