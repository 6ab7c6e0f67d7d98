"""Loads, replaces and unloads adapters while requests run."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from radixkv.api.adapters import Adapter, LoadedAdapter
from radixkv.api.caller import Caller
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.cache.purge import Purged
from radixkv.engine.adapters.adapter_device import AdapterDevice, AdapterWeights
from radixkv.engine.adapters.adapter_directory import AdapterDirectory
from radixkv.engine.adapters.adapter_names import AdapterNames, AdapterRecord, ResolvedAdapter
from radixkv.engine.adapters.keyed_prompt import KeyedPrompt
from radixkv.engine.inbox import EngineThread
from radixkv.errors import InvalidRequest, QueueFull, SwitchedOff
from radixkv.namespace import RESERVED_TENANTS, Namespace, PromptKey

_log = logging.getLogger(__name__)

_LOADS_PER_ADAPTER = 2  # that are unfinished, for each adapter that may be loaded


class AdapterSource(NamedTuple):
    """The device side of adapters.

    Attributes:
        max_adapters: different ones that may be loaded.
        device: holds their weights.
        read: reads and checks a directory, on any thread.
        directory: finds the directories that callers name.
    """

    max_adapters: int
    device: AdapterDevice
    read: Callable[[Path], AdapterWeights]
    directory: AdapterDirectory


class Adapters:
    """The adapters of an engine. Its public methods may be called from any thread.

        load   ─▶ read, on a thread for that ─▶ register, on the engine's thread: the name has it from now on
        unload ─────────────────────────────▶ unregister: the name has nothing from now on
        the last request of an adapter without a name ends ─▶ its weights go, and what is cached with it, in slices

    Args:
        model: fingerprint of the model.
        source: the device side; None if adapters are off.
        cache: belongs to the engine's thread.
        thread: has things done there.
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
        self._freeing: dict[str, Generator[None, None, Purged]] = {}  # by digest; of the engine's thread

    def keyed(self, caller: Caller, tokens: bytes) -> KeyedPrompt:
        """Find out what a caller's prompt is cached under. One that does not invoke its adapter is the base model's.

        Raises:
            UnknownAdapter: no adapter has the caller's name for it.
        """
        return self._keyed(caller, tokens, self._names.find(caller.adapter))

    @contextlib.contextmanager
    def using(self, caller: Caller, tokens: bytes) -> Iterator[KeyedPrompt]:
        """Return the same, and keep the adapter that computes it.

        If nothing is raised inside the `with` block, it is kept until `leave`.
        """
        found = self._names.take(caller.adapter)
        kept = found.digest
        try:
            prompt = self._keyed(caller, tokens, found)
            if prompt.adapter != found.digest:
                kept = ""
                self.leave(found.digest)
            yield prompt
        except BaseException:
            self.leave(kept)
            raise

    def leave(self, digest: str) -> None:
        """Let go of an adapter, of which this is the digest: a request that was `using` it is over."""
        if self._names.leave(digest):
            self._thread.put(self._free_drained)

    def digest_of(self, name: str) -> str:
        """Return the digest behind a name. Raises UnknownAdapter if there is none."""
        return self._names.find(name).digest

    def names_of(self, digest: str) -> tuple[str, ...]:
        """Return the names of a digest; none of the model itself, and of an adapter that drains."""
        return self._names.names_of(digest)

    def load(self, name: str, path: str) -> Future[LoadedAdapter]:
        """Read an adapter, and let a name stand for it. Requests that came before keep what the name stood for.

        A load goes on, and counts, if its future is cancelled.

        Args:
            name: not empty.
            path: a directory, as a caller names it; see `AdapterDirectory.find`.

        Raises:
            SwitchedOff: the engine has no adapters.
            QueueFull: twice as many loads are unfinished as adapters may be loaded.
            Later, through the future: SwitchedOff, InvalidRequest, InvalidAdapter, TooManyAdapters.
        """
        source = self._require_on()
        if not self._room_to_load.acquire(blocking=False):
            raise QueueFull(f"adapters: expected at most {self._max_loads} unfinished loads, got one more")
        try:
            loading = self._readers.submit(self._read_and_register, source, name, path)
        except RuntimeError:
            self._room_to_load.release()
            raise self._thread.cancellation() from None
        loading.add_done_callback(lambda _: self._room_to_load.release())
        loaded: Future[LoadedAdapter] = Future()  # of its own, so that a caller that goes away cancels nothing else
        loading.add_done_callback(partial(_answer, loaded))
        return loaded

    def load_now(self, name: str, directory: Path) -> LoadedAdapter:
        """Do the same at once with any directory, before the engine's thread is started."""
        source = self._require_on()
        return self._register(source, name, source.read(directory))

    def unload(self, name: str) -> Future[None]:
        """Let a name stand for nothing. The future raises UnknownAdapter if it stands for nothing already."""
        return self._thread.call(lambda: self._unregister(name))

    def listing(self) -> Future[list[Adapter]]:
        """List all names, and what drains, with the cached tokens of each."""
        return self._thread.call(self._count_and_list)

    def loaded(self) -> list[Adapter]:
        """List the same at once, without cached tokens."""
        return [self._adapter(*each) for each in self._names.listing()]

    @property
    def max_adapters(self) -> int:
        """Different adapters that may be loaded; 0 if adapters are off."""
        return self._names.max_adapters

    def close(self) -> None:
        """Read nothing more. A load that is under way ends by itself."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _keyed(self, caller: Caller, tokens: bytes, found: ResolvedAdapter) -> KeyedPrompt:
        if (whose := RESERVED_TENANTS.get(caller.tenant)) is not None:
            raise InvalidRequest(f"tenant: expected any name but {caller.tenant}, {whose}, got it")
        base, files = Namespace(self._model, caller.tenant, "", caller.salt), found.files
        start = None if files is None else files.own_from(tokens)
        if files is None or start is None:
            return KeyedPrompt(base, tokens)
        if files.invocation_token_ids is None:
            return KeyedPrompt(base._replace(adapter=files.digest), tokens, self._former(base, tokens, start, found))
        invocation = self._cache.marks.invocation(files.digest, start)
        return KeyedPrompt(base, tokens, self._former(base, tokens, start, found), invocation)

    def _former(self, base: Namespace, tokens: bytes, start: int, found: ResolvedAdapter) -> tuple[PromptKey, ...]:
        """Return the keys that a prompt would have with what its adapter's name stood for before."""
        marks = self._cache.marks
        return tuple(
            PromptKey(base, marks.invocation(digest, start).marked(tokens))
            if marks.has(digest)
            else PromptKey(base._replace(adapter=digest), tokens)
            for digest in found.former
        )

    def _require_on(self) -> AdapterSource:
        if self._source is None:
            raise SwitchedOff("adapters: expected model.max_adapters above 0, got a service without adapters")
        return self._source

    def _read_and_register(self, source: AdapterSource, name: str, path: str) -> LoadedAdapter:
        files = source.read(source.directory.find(path))
        try:
            loaded: LoadedAdapter = self._thread.call(lambda: self._register(source, name, files)).result()
        except CancelledError:
            raise self._thread.cancellation() from None
        return loaded

    def _register(self, source: AdapterSource, name: str, files: AdapterWeights) -> LoadedAdapter:
        digest = files.digest
        self._names.require_room(name, digest)
        for _ in self._freeing.pop(digest, ()):  # it comes back while it is being forgotten
            pass
        if files.invocation_token_ids is not None:
            self._cache.marks.add(digest)
        source.device.add(files)
        replaced = self._names.assign(name, files)
        self._free_drained()
        _log.info("adapter %s is %s, before %s", name, digest, replaced)
        (adapter,) = (each for each in self.loaded() if each.name == name and not each.is_draining)
        return LoadedAdapter(adapter, replaced)

    def _unregister(self, name: str) -> None:
        digest = self._names.drop(name)
        _log.info("adapter %s is unloaded, before %s", name, digest)
        self._free_drained()

    def _free_drained(self) -> None:
        """Free what nobody needs any more: weights at once, cached blocks in slices."""
        is_freeing = bool(self._freeing)
        for digest in self._names.take_drained():
            assert self._source is not None, "adapters are on"
            self._source.device.remove(digest)
            self._freeing[digest] = self._cache.draining(digest)
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
        return [self._adapter(*each, cached_tokens[each[1].files.digest]) for each in self._names.listing()]

    def _adapter(
        self, name: str, known: AdapterRecord, is_draining: bool, num_unfinished: int, cached_tokens: int = 0
    ) -> Adapter:
        assert self._source is not None, "adapters are on"
        files, is_on_device = known.files, self._source.device.is_on_device(known.files.digest)
        return Adapter(
            name, files.digest, files.rank, files.num_bytes, is_on_device, is_draining, num_unfinished, cached_tokens
        )


def _answer(loaded: Future[LoadedAdapter], loading: Future[LoadedAdapter]) -> None:
    """Pass on what became of a load, unless its caller is gone."""
    if loading.cancelled():
        loaded.cancel()
    elif loaded.set_running_or_notify_cancel():
        if (error := loading.exception()) is not None:
            loaded.set_exception(error)
        else:
            loaded.set_result(loading.result())


_END = object()
