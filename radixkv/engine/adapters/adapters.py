"""The adapters of an engine, which are loaded, replaced and unloaded while requests run."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from radixkv.api.adapters import Adapter, LoadedAdapter
from radixkv.api.caller import Caller
from radixkv.api.params import PrefillParams
from radixkv.api.result import GenerateResult, PrefillResult
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.purge import Purged
from radixkv.engine.adapters.adapter_device import AdapterDevice, AdapterWeights
from radixkv.engine.adapters.adapter_directory import AdapterDirectory
from radixkv.engine.adapters.adapter_names import AdapterNames, AdapterRecord, ResolvedAdapter
from radixkv.engine.inbox import EngineThread
from radixkv.errors import InvalidRequest, QueueFull, SwitchedOff
from radixkv.invocation import Invocation
from radixkv.namespace import RESERVED_TENANTS, Namespace, PromptKey
from radixkv.offload.index.prompt_blocks import FetchedBlocks
from radixkv.scheduling.request import Generation, Request

_log = logging.getLogger(__name__)

_LOADS_PER_ADAPTER = 2  # unfinished loads for each adapter that may be loaded
_END = object()  # returned by `next` for a purge that has ended


class AdapterSource(NamedTuple):
    """The device side of adapters.

    Attributes:
        max_adapters: distinct adapters that may be loaded.
        device: holds their weights.
        read: reads and checks a directory, on any thread.
        directory: resolves the paths of callers.
    """

    max_adapters: int
    device: AdapterDevice
    read: Callable[[Path], AdapterWeights]
    directory: AdapterDirectory


class KeyedPrompt(NamedTuple):
    """A prompt with its cache key, in which the adapter's name is resolved.

    Attributes:
        namespace: the namespace whose requests may share its cached tokens.
        tokens: the prompt, little-endian uint32 bytes, as the caller sent it.
        former: its keys before its adapter was replaced; they only explain a miss.
        invocation: where an invoked adapter begins; None if `namespace.adapter` computes the whole prompt.
    """

    namespace: Namespace
    tokens: bytes
    former: Sequence[PromptKey] = ()
    invocation: Invocation | None = None

    @property
    def key(self) -> PromptKey:
        """The key of the prompt in the cache."""
        tokens = self.tokens if self.invocation is None else self.invocation.marked(self.tokens)
        return PromptKey(self.namespace, tokens)

    @property
    def adapter(self) -> str:
        """Digest of the adapter that computes it or a part of it; empty for the base model."""
        return self.namespace.adapter if self.invocation is None else self.invocation.digest

    def request(
        self,
        params: PrefillParams,
        future: Future[PrefillResult] | Future[GenerateResult],
        generation: Generation | None = None,
        fetched: FetchedBlocks | None = None,
    ) -> Request:
        """Create the request for this prompt, received now. `params` are the options of the same prompt."""
        now_s = time.monotonic()
        return Request(params, self.namespace, future, now_s, generation, self.former, self.invocation, fetched)


class Adapters:
    """The adapters of an engine. Its public methods may be called from any thread.

        load   ─▶ read, on a separate thread ─▶ register, on the engine's thread: the name now maps to it
        unload ─────────────────────────────▶ unregister: the name is unknown from now on
        the last request of an unloaded or replaced adapter ends ─▶ its weights are freed, and its K/V purged in slices

    Args:
        model: fingerprint of the model.
        source: the device side; None if adapters are off.
        cache: only the engine's thread uses it.
        thread: runs functions on the engine's thread.
    """

    def __init__(self, model: str, source: AdapterSource | None, cache: PrefixCache, thread: EngineThread) -> None:
        self._model = model
        self._source = source
        self._cache = cache
        self._thread = thread
        self._names = AdapterNames(0 if source is None else source.max_adapters)
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="radixkv-adapters")
        self._max_loads = _LOADS_PER_ADAPTER * self._names.max_adapters
        self._room_to_load = threading.Semaphore(self._max_loads)
        self._freeing: dict[str, Generator[None, None, Purged]] = {}  # by digest; only for the engine's thread

    def keyed(self, caller: Caller, tokens: bytes) -> KeyedPrompt:
        """Return the cache key of a caller's prompt; the base model's key if the prompt does not invoke its adapter.

        Raises:
            UnknownAdapter: no adapter has the name that the caller gives.
            InvalidRequest: the tenant's name is reserved.
        """
        return self._keyed(caller, tokens, self._names.find(caller.adapter))

    def acquire(self, caller: Caller, tokens: bytes) -> KeyedPrompt:
        """Return the same as `keyed`, and keep the adapter until `release` is called with `KeyedPrompt.adapter`."""
        resolved = self._names.acquire(caller.adapter)
        try:
            prompt = self._keyed(caller, tokens, resolved)
        except BaseException:
            self.release(resolved.digest)
            raise
        if resolved.digest and prompt.adapter != resolved.digest:
            self.release(resolved.digest)
        return prompt

    def release(self, digest: str) -> None:
        """Release an adapter by its digest when a request that acquired it has ended. Ignores the base model ("")."""
        if digest and self._names.release(digest):
            self._thread.put(self._free_drained)

    def digest_of(self, name: str) -> str:
        """Return the digest behind a name. Raises UnknownAdapter if there is none."""
        return self._names.find(name).digest

    def names_of(self, digest: str) -> tuple[str, ...]:
        """Return the names of a digest; none for the base model, and for an adapter that drains."""
        return self._names.names_of(digest)

    def load(self, name: str, path: str) -> Future[LoadedAdapter]:
        """Read an adapter, and map a name to it. Earlier requests keep the adapter to which the name was mapped.

        A load continues, and counts as unfinished, if its future is cancelled.

        Args:
            name: not empty.
            path: the directory, relative or absolute; see `AdapterDirectory.find`.

        Raises:
            SwitchedOff: the engine has no adapters.
            QueueFull: twice as many loads are unfinished as adapters may be loaded.
            Draining: the engine has stopped.
            Later, through the future: SwitchedOff, InvalidRequest, InvalidAdapter, TooManyAdapters, and QueueFull,
                Draining or StepHangs if the engine accepts no calls.
        """
        source = self._require_source()
        if not self._room_to_load.acquire(blocking=False):
            raise QueueFull(f"adapters: expected at most {self._max_loads} unfinished loads, got one more")
        try:
            loading = self._readers.submit(self._read_and_register, source, name, path)
        except RuntimeError:
            self._room_to_load.release()
            raise self._thread.cancellation() from None
        loading.add_done_callback(lambda _: self._room_to_load.release())
        loaded: Future[LoadedAdapter] = Future()  # separate, so that a caller that cancels does not cancel the load
        loading.add_done_callback(partial(_pass_on, loaded))
        return loaded

    def load_now(self, name: str, directory: Path) -> LoadedAdapter:
        """Load from any directory and wait for it, before the engine's thread is started."""
        source = self._require_source()
        return self._register(source, name, source.read(directory))

    def unload(self, name: str) -> Future[None]:
        """Unload the adapter of a name. The future raises UnknownAdapter if there is none."""
        return self._thread.call(lambda: self._unregister(name))

    def listing(self) -> Future[list[Adapter]]:
        """List all names, and adapters that drain, with the cached tokens of each."""
        return self._thread.call(self._count_and_list)

    def loaded(self) -> list[Adapter]:
        """List all names, and adapters that drain, without waiting for the engine's thread; cached tokens are 0."""
        return [self._adapter(*each) for each in self._names.listing()]

    @property
    def max_adapters(self) -> int:
        """Distinct adapters that may be loaded; 0 if adapters are off."""
        return self._names.max_adapters

    def close(self) -> None:
        """Start no more loads, and cancel the futures of those that wait. A load that is running ends by itself."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _keyed(self, caller: Caller, tokens: bytes, resolved: ResolvedAdapter) -> KeyedPrompt:
        reserved_for = RESERVED_TENANTS.get(caller.tenant)
        if reserved_for is not None:
            raise InvalidRequest(f"tenant: expected any name but {caller.tenant}, which is reserved for {reserved_for}")
        base = Namespace(self._model, caller.tenant, "", caller.salt)
        weights = resolved.weights
        if weights is None:
            return KeyedPrompt(base, tokens)
        start = weights.applies_from(tokens)
        if start is None:
            return KeyedPrompt(base, tokens)
        former = self._former(base, tokens, start, resolved)
        if weights.invocation_token_ids is None:
            return KeyedPrompt(base._replace(adapter=weights.digest), tokens, former)
        return KeyedPrompt(base, tokens, former, self._cache.marks.invocation(weights.digest, start))

    def _former(self, base: Namespace, tokens: bytes, start: int, resolved: ResolvedAdapter) -> tuple[PromptKey, ...]:
        """Return the keys that a prompt had with the previous adapters of its adapter's name."""
        marks = self._cache.marks
        return tuple(
            PromptKey(base, marks.invocation(digest, start).marked(tokens))
            if marks.has(digest)
            else PromptKey(base._replace(adapter=digest), tokens)
            for digest in resolved.former
        )

    def _require_source(self) -> AdapterSource:
        if self._source is None:
            raise SwitchedOff("adapters: expected model.max_adapters above 0, got a service without adapters")
        return self._source

    def _read_and_register(self, source: AdapterSource, name: str, path: str) -> LoadedAdapter:
        weights = source.read(source.directory.find(path))
        try:
            loaded: LoadedAdapter = self._thread.call(lambda: self._register(source, name, weights)).result()
        except CancelledError:
            raise self._thread.cancellation() from None
        return loaded

    def _register(self, source: AdapterSource, name: str, weights: AdapterWeights) -> LoadedAdapter:
        digest = weights.digest
        self._names.require_room(name, digest)
        for _ in self._freeing.pop(digest, ()):  # finish the purge of the same content before it is loaded again
            pass
        if weights.invocation_token_ids is not None:
            self._cache.marks.add(digest)
        source.device.add(weights)
        replaced = self._names.assign(name, weights)
        self._free_drained()
        _log.info("adapter %s has the digest %s; its previous digest: %s", name, digest, replaced)
        (adapter,) = (each for each in self.loaded() if each.name == name and not each.is_draining)
        return LoadedAdapter(adapter, replaced)

    def _unregister(self, name: str) -> None:
        digest = self._names.drop(name)
        _log.info("unloaded adapter %s with the digest %s", name, digest)
        self._free_drained()

    def _free_drained(self) -> None:
        """Free the adapters that no request needs any more: the weights immediately, the cached blocks in slices."""
        is_freeing = bool(self._freeing)
        for digest in self._names.take_drained():
            assert self._source is not None, "adapters are on"
            self._source.device.remove(digest)
            self._freeing[digest] = self._cache.purge_adapter_in_slices(digest)
        if self._freeing and not is_freeing:
            self._free_slice()

    def _free_slice(self) -> None:
        digest = next(iter(self._freeing), None)
        if digest is not None and next(self._freeing[digest], _END) is _END:
            self._freeing.pop(digest)
        if self._freeing:
            self._thread.put(self._free_slice)

    def _count_and_list(self) -> Generator[None, None, list[Adapter]]:
        """Count in slices, between which steps may run."""
        cached_tokens: Counter[str] = yield from self._cache.segments.tokens_by_adapter()
        return [self._adapter(*each, cached_tokens[each[1].weights.digest]) for each in self._names.listing()]

    def _adapter(
        self, name: str, record: AdapterRecord, is_draining: bool, num_unfinished: int, cached_tokens: int = 0
    ) -> Adapter:
        assert self._source is not None, "adapters are on"
        weights = record.weights
        return Adapter(
            name,
            weights.digest,
            weights.rank,
            weights.num_bytes,
            self._source.device.is_on_device(weights.digest),
            is_draining,
            num_unfinished,
            cached_tokens,
        )


def _pass_on(loaded: Future[LoadedAdapter], loading: Future[LoadedAdapter]) -> None:
    """Pass the outcome of a load to its caller."""
    if loading.cancelled():
        loaded.cancel()
    elif loaded.set_running_or_notify_cancel():
        if (error := loading.exception()) is not None:
            loaded.set_exception(error)
        else:
            loaded.set_result(loading.result())
