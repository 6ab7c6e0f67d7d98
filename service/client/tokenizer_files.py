"""Tokenizer files that a server sent: verified, unpacked, and stored on disk under their digest."""

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

# Raised for a zip that is damaged, encrypted, or compressed by an unknown method.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError)
_DIGEST = re.compile(r"[0-9a-f]{64}")
# Data files, and chat templates in their own folder. Code is not accepted.
_FILE_NAME = "[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"
_ENTRY = re.compile(rf"{_FILE_NAME}\.(?:json|jinja|txt|model|tiktoken)|additional_chat_templates/{_FILE_NAME}\.jinja")


class ArchiveReader:
    """Assembles the zip archive that the responses of `GetTokenizer` carry, and unpacks it.

    Attributes:
        digest: the SHA-256 that the server sent; empty until it has arrived.
    """

    def __init__(self) -> None:
        self.digest = ""
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def add(self, chunk: TokenizerChunk) -> None:
        """Add the next response.

        Raises:
            ValueError: the archive is larger than `MAX_BYTES`.
        """
        self._num_bytes += len(chunk.data)
        if self._num_bytes > MAX_BYTES:
            raise ValueError(f"tokenizer: the zip archive is larger than {MAX_BYTES} bytes")
        self._pieces.append(chunk.data)
        self.digest = chunk.sha256 or self.digest

    def store(self) -> Path:
        """Verify the archive and unpack it into the cache directory, or into a temporary one if that is not writable.

        Returns:
            The directory with the files.

        Raises:
            ValueError: the archive does not match its digest, or is not a zip of tokenizer files.
            OSError: neither the cache directory nor a temporary one is writable.
        """
        archive = b"".join(self._pieces)
        digest = hashlib.sha256(archive).hexdigest()
        if digest != self.digest:
            raise ValueError(
                f"tokenizer: expected a zip archive with the digest {self.digest or 'in the last message'}, "
                f"got {digest}"
            )
        try:
            return _install(archive, digest, _tokenizers_folder())
        except OSError:  # the home directory is read-only or full
            return _install(archive, digest, temporary_cache_directory() / "tokenizers")


def stored_files(digest: str) -> Path | None:
    """Return the directory with the files of this digest; None if they are not stored.

    Raises:
        ValueError: `digest` is not a SHA-256 in hexadecimal digits.
    """
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"tokenizer: expected a digest of 64 hexadecimal digits, got {len(digest)} characters")
    directory = _tokenizers_folder() / digest
    return directory if os.path.isdir(directory) else None  # also False if the home directory may not be read


def _install(archive: bytes, digest: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    unpacked = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=folder))
    try:
        _unpack(archive, unpacked)
        unpacked.rename(folder / digest)
    except OSError:
        if not (folder / digest).is_dir():  # otherwise another process has stored the same files
            raise
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)
    return folder / digest


def _unpack(archive: bytes, directory: Path) -> None:
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as zipped:
            entries = zipped.infolist()
            if len(entries) > MAX_FILES:
                raise ValueError(f"tokenizer: expected at most {MAX_FILES} files, got {len(entries)}")
            remaining_bytes = MAX_BYTES
            for entry in entries:
                if not _ENTRY.fullmatch(entry.filename):
                    raise ValueError(f"tokenizer: expected plain names of data files, got {entry.filename[:100]!r}")
                with zipped.open(entry) as file:
                    content = file.read(remaining_bytes + 1)  # the size that an entry declares may be wrong
                remaining_bytes -= len(content)
                if remaining_bytes < 0:
                    raise ValueError(f"tokenizer: the files in the zip archive are larger than {MAX_BYTES} bytes")
                (directory / entry.filename).parent.mkdir(exist_ok=True)
                (directory / entry.filename).write_bytes(content)
    except _ZIP_ERRORS as error:
        problem = f"the {len(archive)} bytes that the server sent are no valid zip archive"
        raise ValueError(f"tokenizer: {problem}") from error


def _tokenizers_folder() -> Path:
    return cache_directory() / "tokenizers"
