"""Creates the files of a model directory, without weights, from a GGUF file."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from radixkv.config.atomic_directory import atomic_directory
from radixkv.config.cache_directory import cache_directory, temporary_cache_directory
from radixkv.model_files.gguf_config import generation_config, model_config
from radixkv.model_files.gguf_file import GgufFile
from radixkv.model_files.gguf_tokenizer import tokenizer_files

_FORMAT = 1  # incremented when this module writes other files


def gguf_directory(path: Path) -> Path:
    """Return a directory with config.json, generation_config.json, the tokenizer and the chat template of a GGUF file.

    The directory is created at the first call, in the subdirectory gguf of `cache_directory`, or in a temporary
    directory if that is not writable. If the file is replaced, a new directory is created.

    Args:
        path: an existing file.

    Raises:
        ConfigError: the file is damaged or not supported, or the package tokenizers is missing.
    """
    status, absolute_path = path.stat(), str(path.resolve())
    digest = hashlib.sha256(json.dumps([_FORMAT, absolute_path, status.st_size, status.st_mtime_ns]).encode())
    name = digest.hexdigest()[:32]
    cached = cache_directory() / "gguf" / name
    if cached.is_dir():
        return cached
    file = GgufFile.read(path)
    files = {
        "config.json": _json(model_config(file)),
        "generation_config.json": _json(generation_config(file)),
        **tokenizer_files(file),
    }
    try:
        return _install(files, cached)
    except OSError:  # the home directory is read-only or full
        return _install(files, temporary_cache_directory() / "gguf" / name)


def _install(files: Mapping[str, bytes], target: Path) -> Path:
    with contextlib.suppress(FileExistsError), atomic_directory(target) as directory:  # another process was faster
        for name, content in files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(content)
    return target


def _json(tree: Mapping[str, object]) -> bytes:
    return json.dumps(tree, ensure_ascii=False, indent=1).encode()
