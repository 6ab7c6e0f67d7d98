"""Makes constraints of what callers write, beside the event loop, and keeps the latest ones."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from typing import TYPE_CHECKING

from radixkv.api.sampling import Sampling
from radixkv.errors import InvalidRequest, QueueFull
from radixkv.service.missing_package import missing_package
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.structured.grammar_text import GrammarText

if TYPE_CHECKING:  # llguidance is needed where somebody asks for it
    from radixkv.service.structured.matcher import GrammarConstraint
    from radixkv.service.structured.vocabulary import Vocabulary

MAX_KEPT = 64
MAX_WAITING = 32
MAX_COMPILE_S = 10.0

# llguidance recurses once for each rule or reference of a grammar, and a stack that overflows ends the process. The
# worst of the longest texts that were found needs 8 to 32 MiB. Memory is taken only as far as it is used.
_STACK_BYTES = 512 * 2**20

_logger = logging.getLogger(__name__)


class Grammars:
    """Makes constraints for one model. To be used on one event loop.

    Args:
        tokenizer: the model's; loaded for the first text.
        vocab_size: number of the model's tokens.
        eos_token_ids: the model's own end-of-sequence tokens.
    """

    def __init__(self, tokenizer: ModelTokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._waiting: deque[tuple[GrammarText, Future[GrammarConstraint]]] = deque()
        self._is_compiling = False
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[GrammarText, Future[GrammarConstraint]] = OrderedDict()  # the latest last

    async def constrain(self, sampling: Sampling, text: GrammarText | None) -> Sampling:
        """Return the same options with what an answer must follow; as they are without a text.

        A text is compiled once, in turn with others, as long as it is among the latest. The first one waits until the
        tokenizer is loaded.

        Raises:
            InvalidRequest: no answer can follow it, the model has no tokenizer for it, or llguidance is missing. The
                message names the field.
            QueueFull: too many texts wait.
        """
        if text is None:
            return sampling
        text.require_short()
        compiled = self._kept.get(text)
        if compiled is None:
            compiled = self._compile_later(text)
        self._kept.move_to_end(text)
        try:
            # The caller may go away; others may wait for the same text.
            constraint = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(compiled)), MAX_COMPILE_S)
        except TimeoutError as error:
            if not compiled.running():
                raise QueueFull(
                    f"{text.field}: expected its turn in {MAX_COMPILE_S:g} s, got others before it"
                ) from error
            raise InvalidRequest(
                f"{text.field}: expected one that is compiled in {MAX_COMPILE_S:g} s, got one that takes longer"
            ) from error
        return dataclasses.replace(sampling, constraint=constraint)

    def _compile_later(self, text: GrammarText) -> Future[GrammarConstraint]:
        if sum(not future.done() for future in self._kept.values()) >= MAX_WAITING:
            raise QueueFull(f"{text.field}: expected at most {MAX_WAITING} texts that wait to be compiled, got more")
        while len(self._kept) >= MAX_KEPT:
            del self._kept[next(kept for kept, future in self._kept.items() if future.done())]
        future: Future[GrammarConstraint] = Future()
        self._kept[text] = future
        with self._lock:
            self._waiting.append((text, future))
            if not self._is_compiling:
                self._is_compiling = True
                self._start_thread()
        return future

    def _start_thread(self) -> None:
        before_bytes = threading.stack_size(_STACK_BYTES)
        try:  # a daemon: no exit waits for a text that takes long
            threading.Thread(target=self._compile_all, name="radixkv-grammars", daemon=True).start()
        finally:
            threading.stack_size(before_bytes)

    def _compile_all(self) -> None:
        """Compile what waits, in turn."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_compiling = False
                    return
                text, future = self._waiting.popleft()
            future.set_running_or_notify_cancel()
            try:
                future.set_result(self._compile(text))
            except BaseException as error:  # noqa: BLE001 - it is the answer to those who wait
                future.set_exception(error)

    def _compile(self, text: GrammarText) -> GrammarConstraint:
        try:
            from radixkv.service.structured.matcher import GrammarConstraint
        except ModuleNotFoundError as error:
            raise InvalidRequest(f"{text.field}: {missing_package('llguidance', 'structured')}") from error
        if self._vocabulary is None:
            self._vocabulary = self._load_vocabulary(text.field)
        return GrammarConstraint(text, self._vocabulary)

    def _load_vocabulary(self, field: str) -> Vocabulary:
        from radixkv.service.structured.vocabulary import Vocabulary

        try:
            return Vocabulary.of(self._tokenizer.load().definition, self._vocab_size, self._eos_token_ids)
        except ValueError as error:
            _logger.warning("a constraint was asked for, and there is no tokenizer for it: %s", error)  # has our paths
            raise InvalidRequest(
                f"{field}: expected a model whose tokenizer llguidance reads, got one without"
            ) from error
