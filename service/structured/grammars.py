"""Makes constraints of what callers write, beside the event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from radixkv.api.sampling import Sampling
from radixkv.errors import InvalidRequest, QueueFull
from radixkv.service.missing_package import missing_package
from radixkv.service.server.intake.account import Account
from radixkv.service.server.intake.shares import Shares
from radixkv.service.server.model_tokenizer import ModelTokenizer
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


class _Waiting(NamedTuple):
    """A text that is not compiled yet, and the future of its constraint."""

    text: GrammarText
    compiled: Future[GrammarConstraint]


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
        self._waiting: OrderedDict[Account, deque[_Waiting]] = OrderedDict()  # the next one first
        self._num_waiting = Shares(MAX_WAITING, "texts that wait to be compiled")
        self._is_compiling = False
        self._vocabulary: Vocabulary | None = None
        self._kept = KeptTexts(MAX_KEPT)

    async def constrain(self, sampling: Sampling, text: GrammarText | None, account: Account) -> Sampling:
        """Return the same options with what an answer must follow; as they are without a text.

        A text is compiled once for an account, in turn with others, as long as it is among the latest. The first one
        waits until the tokenizer is loaded.

        Raises:
            InvalidRequest: no answer can follow it, the model has no tokenizer for it, or llguidance is missing. The
                message names the field.
            QueueFull: too many texts wait, also of this account; or others took too long.
        """
        if text is None:
            return sampling
        text.require_short()
        compiled = self._kept.find(account, text) or self._compile_later(text, account)
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

    def _compile_later(self, text: GrammarText, account: Account) -> Future[GrammarConstraint]:
        future: Future[GrammarConstraint] = Future()
        with self._lock:
            self._num_waiting.take(account, 1)
            self._waiting.setdefault(account, deque()).append(_Waiting(text, future))
            if not self._is_compiling:
                self._is_compiling = True
                self._start_thread()
        self._kept.add(account, text, future)
        return future

    def _start_thread(self) -> None:
        before_bytes = threading.stack_size(_STACK_BYTES)
        try:  # a daemon: no exit waits for a text that takes long
            threading.Thread(target=self._compile_all, name="radixkv-grammars", daemon=True).start()
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
                text, future = texts.popleft()
                if texts:
                    self._waiting[account] = texts
            future.set_running_or_notify_cancel()
            constraint = self._compiled(text)
            with self._lock:
                self._num_waiting.give_back(account, 1)
            if isinstance(constraint, BaseException):
                future.set_exception(constraint)
            else:
                future.set_result(constraint)

    def _compiled(self, text: GrammarText) -> GrammarConstraint | BaseException:
        try:
            return self._compile(text)
        except BaseException as error:  # noqa: BLE001 - it is the answer to those who wait
            return error

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
