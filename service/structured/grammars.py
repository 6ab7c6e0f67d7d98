"""Compiles the grammars of requests on a thread. Tenants take turns."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

from radixkv.api.sampling import Sampling
from radixkv.config.needed_package import missing_package
from radixkv.errors import InvalidRequest, QueueFull
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.receive.fair_shares import FairShares, QuotaKey
from radixkv.service.structured.compilation import Compilation
from radixkv.service.structured.grammar_cache import GrammarCache
from radixkv.service.structured.grammar_text import GrammarText

if TYPE_CHECKING:  # llguidance is needed only where a request has a grammar
    from radixkv.service.structured.matcher import GrammarConstraint
    from radixkv.service.structured.vocabulary import Vocabulary

MAX_CACHED = 64
MAX_WAITING = 32
MAX_COMPILE_S = 10.0

# llguidance recurses once per rule or reference of a grammar, and a stack overflow ends the process. The worst grammar
# of maximum length that was found needs 8 to 32 MiB. Only memory that is used is allocated.
_STACK_BYTES = 512 * 2**20

_logger = logging.getLogger(__name__)


class Grammars:
    """Compiles grammars for one model; quota keys take turns. For use on one event loop at a time.

    Args:
        tokenizer: the model's tokenizer; loaded for the first grammar.
        vocab_size: number of the model's tokens.
        eos_token_ids: the model's own end-of-sequence tokens.
    """

    def __init__(self, tokenizer: ModelTokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()  # guards the queue
        self._waiting: OrderedDict[QuotaKey, deque[Compilation]] = OrderedDict()  # in the order of their turns
        self._queue_shares = FairShares(MAX_WAITING, "grammars that wait to be compiled")
        self._is_compiling = False
        self._vocabulary: Vocabulary | None = None
        self._load_ended: Future[None] = Future()  # set when the vocabulary is loaded, or cannot be loaded
        self._cache = GrammarCache(MAX_CACHED)

    async def constrain(self, sampling: Sampling, text: GrammarText | None, key: QuotaKey) -> Sampling:
        """Return the sampling options with the constraint of a grammar; unchanged options without a grammar.

        A grammar is compiled once per quota key, as long as it stays in the cache. `MAX_COMPILE_S` bounds the time in
        the queue, and then the time to compile. The first grammars also wait until the tokenizer is loaded, for which
        there is no limit.

        Raises:
            InvalidRequest: the grammar is not valid, is too long or takes too long to compile, no completion can follow
                it, the model has no suitable tokenizer, or llguidance is not installed. The message names the field.
            QueueFull: too many grammars are queued, see `FairShares`; earlier ones took too long; or no thread can be
                started.
        """
        if text is None:
            return sampling
        text.require_short()
        compilation = self._cache.find(key, text) or self._compile_later(text, key)
        await asyncio.shield(asyncio.wrap_future(self._load_ended))  # cancelling this call must not cancel the future
        return dataclasses.replace(sampling, constraint=await compilation.constraint(MAX_COMPILE_S))

    def _compile_later(self, text: GrammarText, key: QuotaKey) -> Compilation:
        compilation = Compilation(text)
        with self._lock:
            if not self._is_compiling:
                self._start_thread(text.field)  # nothing is queued if it cannot start
                self._is_compiling = True
            self._queue_shares.take(key, 1)
            self._waiting.setdefault(key, deque()).append(compilation)
        self._cache.add(key, compilation)
        return compilation

    def _start_thread(self, field: str) -> None:
        usual_stack_bytes = threading.stack_size(_STACK_BYTES)
        try:  # a daemon thread, so that a slow compilation does not delay the exit
            threading.Thread(target=self._compile_all, name="radixkv-grammars", daemon=True).start()
        except RuntimeError as error:
            _logger.warning("a request has a grammar, but no thread can be started to compile it: %s", error)
            raise QueueFull(f"{field}: no thread can be started to compile it; try again later") from error
        finally:
            threading.stack_size(usual_stack_bytes)

    def _compile_all(self) -> None:
        """Compile the queue: the first grammar of each quota key in turn."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_compiling = False
                    return
                key, compilations = self._waiting.popitem(last=False)
                compilation = compilations.popleft()
                if compilations:
                    self._waiting[key] = compilations
            outcome = self._try_compile(compilation)
            with self._lock:
                self._queue_shares.release(key, 1)
            compilation.end(outcome)

    def _try_compile(self, compilation: Compilation) -> GrammarConstraint | BaseException:
        """Return the compiled grammar, or the error."""
        try:
            vocabulary = self._load_and_begin(compilation)
            return self._compile(compilation.text, vocabulary)
        except BaseException as error:  # noqa: BLE001 - it is the result for the waiting calls
            return error

    def _load_and_begin(self, compilation: Compilation) -> Vocabulary:
        """Return the vocabulary, loading it if necessary. Records, even on failure, that the compilation has begun."""
        try:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary(compilation.text.field)
            return self._vocabulary
        finally:
            compilation.begin()
            if not self._load_ended.done():
                self._load_ended.set_result(None)

    def _compile(self, text: GrammarText, vocabulary: Vocabulary) -> GrammarConstraint:
        from radixkv.service.structured.matcher import GrammarConstraint

        return GrammarConstraint(text, vocabulary)

    def _load_vocabulary(self, field: str) -> Vocabulary:
        try:
            from radixkv.service.structured.vocabulary import Vocabulary
        except ModuleNotFoundError as error:
            raise InvalidRequest(f"{field}: {missing_package('llguidance', 'structured')}") from error
        try:
            return Vocabulary.of(self._tokenizer.load().definition, self._vocab_size, self._eos_token_ids)
        except ValueError as error:
            # Only the log has the error, which may name paths.
            _logger.warning("a request has a grammar, but the model has no suitable tokenizer: %s", error)
            raise InvalidRequest(f"{field}: the model has no tokenizer that llguidance can read") from error
