"""Tokenizer files that a service sent: checked, unpacked, and kept by their digest."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path

from radixkv.config.cache_directory import cache_directory, temporary_cache_directory
from radixkv.v1.model_pb2 import TokenizerChunk

MAX_BYTES = 512 * 2**20
MAX_FILES = 50

# The zip is broken, encrypted, or packed by a method of its own.
_NO_ZIP = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError)
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Plain names of data files, and chat templates in a folder of their own. Code is not among them.
_PLAIN = "[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
_NAME = re.compile(rf"{_PLAIN}\.(?:json|jinja|txt|model|tiktoken)|additional_chat_templates/{_PLAIN}\.jinja")


class ArchiveReader:
    """Puts a zip together from the messages of `GetTokenizer`, and unpacks it.

    Attributes:
        digest: the SHA-256 that the service told last; empty before.
    """

    def __init__(self) -> None:
        self.digest = ""
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def put(self, chunk: TokenizerChunk) -> None:
        """Take the next message.

        Raises:
            ValueError: there are too many bytes.
        """
        self._num_bytes += len(chunk.data)
        if self._num_bytes > MAX_BYTES:
            raise ValueError(f"tokenizer: expected a zip of at most {MAX_BYTES} bytes, got more")
        self._pieces.append(chunk.data)
        self.digest = chunk.sha256 or self.digest

    def keep(self) -> Path:
        """Check the zip, and unpack it for this process and later ones; for this one alone where nothing can be kept.

        Returns:
            The directory with the files.

        Raises:
            ValueError: it has another digest, or is no zip of tokenizer files.
            OSError: the files can't be written, neither to the cache directory nor to a temporary one.
        """
        data = b"".join(self._pieces)
        digest = hashlib.sha256(data).hexdigest()
        if digest != self.digest:
            raise ValueError(
                f"tokenizer: expected a zip with the digest {self.digest or 'that follows it'}, got {digest}"
            )
        try:
            return _install(data, digest, _folder())
        except OSError:  # a home that is read-only or full
            return _install(data, digest, temporary_cache_directory() / "tokenizers")


def kept(digest: str) -> Path | None:
    """Return the directory with the files of this digest; None if they have not been kept.

    Raises:
        ValueError: it is no SHA-256 in hexadecimal digits.
    """
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"tokenizer: expected a digest of 64 hexadecimal digits, got {len(digest)} characters")
    directory = _folder() / digest
    return directory if os.path.isdir(directory) else None  # also False where the home may not be entered


def _install(data: bytes, digest: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    half_done = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=folder))
    try:
        _unpack(data, half_done)
        half_done.rename(folder / digest)
    except OSError:
        if not (folder / digest).is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(half_done, ignore_errors=True)
    return folder / digest


def _unpack(data: bytes, directory: Path) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as zipped:
            entries = zipped.infolist()
            if len(entries) > MAX_FILES:
                raise ValueError(f"tokenizer: expected at most {MAX_FILES} files, got {len(entries)}")
            num_left = MAX_BYTES
            for entry in entries:
                if not _NAME.fullmatch(entry.filename):
                    raise ValueError(f"tokenizer: expected plain names of data files, got {entry.filename[:100]!r}")
                with zipped.open(entry) as file:
                    content = file.read(num_left + 1)  # whatever size the entry claims to have
                num_left -= len(content)
                if num_left < 0:
                    raise ValueError(f"tokenizer: expected at most {MAX_BYTES} bytes of files, got more")
                (directory / entry.filename).parent.mkdir(exist_ok=True)
                (directory / entry.filename).write_bytes(content)
    except _NO_ZIP as error:
        raise ValueError(f"tokenizer: expected a zip, got {len(data)} other bytes") from error


def _folder() -> Path:
    return cache_directory() / "tokenizers"
