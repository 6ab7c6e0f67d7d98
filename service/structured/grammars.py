"""Makes constraints of what callers write, beside the event loop."""

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
from radixkv.service.server.intake.account import Account
from radixkv.service.server.intake.shares import Shares
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.structured.compilation import Compilation
from radixkv.service.structured.grammar_text import GrammarText
from radixkv.service.structured.kept_texts import KeptTexts

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
    """Makes constraints for one model, in turn for each account. To be used on one event loop.

    Args:
        tokenizer: the model's; loaded for the first text.
        vocab_size: number of the model's tokens.
        eos_token_ids: the model's own end-of-sequence tokens.
    """

    def __init__(self, tokenizer: ModelTokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()  # guards what waits
        self._waiting: OrderedDict[Account, deque[Compilation]] = OrderedDict()  # the next one first
        self._num_waiting = Shares(MAX_WAITING, "texts that wait to be compiled")
        self._is_compiling = False
        self._vocabulary: Vocabulary | None = None
        self._is_loaded: Future[None] = Future()  # or could not be
        self._kept = KeptTexts(MAX_KEPT)

    async def constrain(self, sampling: Sampling, text: GrammarText | None, account: Account) -> Sampling:
        """Return the same options with what an answer must follow; as they are without a text.

        A text is compiled once for an account, in turn with others, as long as it is among the latest. The first ones
        wait until the tokenizer is loaded, which is not counted: `MAX_COMPILE_S` bounds the time until a text has its
        turn, and then the time until it is compiled.

        Raises:
            InvalidRequest: no answer can follow it, the model has no tokenizer for it, or llguidance is missing. The
                message names the field.
            QueueFull: too many texts wait, also of this account; others took too long; or no thread can be started.
        """
        if text is None:
            return sampling
        text.require_short()
        compilation = self._kept.find(account, text) or self._compile_later(text, account)
        await asyncio.shield(asyncio.wrap_future(self._is_loaded))  # the caller may go away, and others wait
        return dataclasses.replace(sampling, constraint=await compilation.constraint(MAX_COMPILE_S))

    def _compile_later(self, text: GrammarText, account: Account) -> Compilation:
        compilation = Compilation(text)
        with self._lock:
            if not self._is_compiling:
                self._start_thread(text.field)  # it waits for the lock; without it nothing is to wait
                self._is_compiling = True
            self._num_waiting.take(account, 1)
            self._waiting.setdefault(account, deque()).append(compilation)
        self._kept.add(account, compilation)
        return compilation

    def _start_thread(self, field: str) -> None:
        before_bytes = threading.stack_size(_STACK_BYTES)
        try:  # a daemon: no exit waits for a text that takes long
            threading.Thread(target=self._compile_all, name="radixkv-grammars", daemon=True).start()
        except RuntimeError as error:
            _logger.warning("a constraint was asked for, and there is no thread to compile it: %s", error)
            raise QueueFull(f"{field}: expected a thread that compiles it, got as many as may be") from error
        finally:
            threading.stack_size(before_bytes)

    def _compile_all(self) -> None:
        """Compile what waits: the first text of each account in turn."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._is_compiling = False
                    return
                account, texts = self._waiting.popitem(last=False)
                compilation = texts.popleft()
                if texts:
                    self._waiting[account] = texts
            outcome = self._outcome(compilation)
            with self._lock:
                self._num_waiting.give_back(account, 1)
            compilation.end(outcome)

    def _outcome(self, compilation: Compilation) -> GrammarConstraint | BaseException:
        try:
            vocabulary = self._loaded(compilation)
            return self._compile(compilation.text, vocabulary)
        except BaseException as error:  # noqa: BLE001 - it is the answer to those who wait
            return error

    def _loaded(self, compilation: Compilation) -> Vocabulary:
        """Return the vocabulary, and begin a text once it is loaded, or can't be."""
        try:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary(compilation.text.field)
            return self._vocabulary
        finally:
            compilation.begin()
            if not self._is_loaded.done():
                self._is_loaded.set_result(None)

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
            _logger.warning("a constraint was asked for, and there is no tokenizer for it: %s", error)  # has our paths
            raise InvalidRequest(
                f"{field}: expected a model whose tokenizer llguidance reads, got one without"
            ) from error
