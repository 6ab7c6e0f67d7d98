"""The tokenizer of the served model, loaded when it is first needed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from radixkv.errors import ConfigError, InvalidRequest, UnknownTokenizer
from radixkv.model_files.model_location import files_directory
from radixkv.service.missing_package import MissingPackage
from radixkv.service.server.tokenizer_archive import tokenizer_archive
from radixkv.service.text.tokenizer import Tokenizer

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def files_of_model(model_path: str) -> Iterator[Path]:
    """Yield the directory with a model's config.json and tokenizer; for the embedded model, a temporary directory.

    Args:
        model_path: `tiny`, or see `files_directory`.

    Raises:
        UnknownTokenizer: the model's directory does not exist any more.
    """
    if model_path != "tiny":
        try:
            directory = files_directory(model_path)
        except ConfigError as error:
            raise UnknownTokenizer(f"tokenizer: {error}") from error
        yield directory
        return
    from radixkv.model.tiny_files import write_tiny_files

    with tempfile.TemporaryDirectory(prefix="radixkv-") as name:
        write_tiny_files(Path(name))
        yield Path(name)


class ModelTokenizer:
    """Loads a model's tokenizer at most once, on the thread that first needs it. Thread-safe.

    Args:
        model_path: `tiny`, or see `files_directory`; None for a model without files.
    """

    def __init__(self, model_path: str | None) -> None:
        self._model_path = model_path
        self._archive_lock = threading.Lock()
        self._archive: tuple[bytes, str] | None = None
        self._archive_task: asyncio.Future[tuple[bytes, str]] | None = None  # for `archive_async`
        self._load_lock = threading.Lock()
        self._loaded: Tokenizer | str | None = None  # the text says why it cannot be loaded
        self._load_task: asyncio.Future[Tokenizer] | None = None  # for `load_async`

    def archive(self) -> tuple[bytes, str]:
        """Return the tokenizer's files as a zip, see `tokenizer_archive`, and its SHA-256 in hexadecimal digits.

        Reads the files the first time. That takes milliseconds, or seconds if `tokenizer.json` has to be generated.

        Raises:
            UnknownTokenizer: the model has no tokenizer.
        """
        with self._archive_lock:
            if self._archive is None:
                if self._model_path is None:
                    raise UnknownTokenizer("tokenizer: the served model has no files, and so no tokenizer")
                with files_of_model(self._model_path) as directory:
                    data = tokenizer_archive(directory)
                self._archive = data, hashlib.sha256(data).hexdigest()
            return self._archive

    async def archive_async(self) -> tuple[bytes, str]:
        """Return what `archive` returns. One thread reads the files, however many calls wait for them.

        For use on one event loop.
        """
        if self._archive is not None:
            return self._archive
        if self._archive_task is None:
            self._archive_task = asyncio.ensure_future(asyncio.to_thread(self.archive))
            self._archive_task.add_done_callback(self._forget_archive_task)
        return await asyncio.shield(self._archive_task)

    def _forget_archive_task(self, done: asyncio.Future[tuple[bytes, str]]) -> None:
        self._archive_task = None
        if not done.cancelled():
            done.exception()  # retrieved here, because no caller may be waiting any more

    def load(self) -> Tokenizer:
        """Return the tokenizer. The first call loads it, which may take seconds.

        Raises:
            ValueError: the model has no tokenizer that can be loaded.
        """
        with self._load_lock:
            if self._loaded is None:
                self._loaded = self._load()
            if isinstance(self._loaded, str):
                raise ValueError(self._loaded)  # a new exception, since each raise adds to its traceback
            return self._loaded

    async def load_async(self) -> Tokenizer:
        """Return the tokenizer as `load` does. One thread loads it, however many calls wait for it.

        For use on one event loop.
        """
        if self._loaded is not None:
            return self.load()
        if self._load_task is None:
            self._load_task = asyncio.ensure_future(asyncio.to_thread(self.load))
            self._load_task.add_done_callback(self._forget_load_task)
        return await asyncio.shield(self._load_task)

    async def require_async(self, field: str, requirement: str) -> Tokenizer:
        """Return the tokenizer that a request requires, as `load_async` does.

        Args:
            field: the field of the request that requires it.
            requirement: what requires it, such as "stop strings require".

        Raises:
            InvalidRequest: the model has no tokenizer that can be loaded. The log has the reason, which may name local
                paths.
        """
        try:
            return await self.load_async()
        except ValueError as error:
            _logger.warning("%s a tokenizer, but the model has no tokenizer: %s", requirement, error)
            raise InvalidRequest(f"{field}: the model has no tokenizer, which {requirement}") from error

    def _forget_load_task(self, done: asyncio.Future[Tokenizer]) -> None:
        self._load_task = None
        if not done.cancelled():
            done.exception()  # retrieved here, because no caller may be waiting any more

    def _load(self) -> Tokenizer | str:
        if self._model_path is None:
            return "the served model has no files, and so no tokenizer"
        try:
            with files_of_model(self._model_path) as directory:
                return Tokenizer.load(directory)
        except (UnknownTokenizer, MissingPackage, ValueError) as error:
            return str(error)
