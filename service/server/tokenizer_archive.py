"""The files of a model's tokenizer as one zip archive."""

from __future__ import annotations

import io
import logging
import zipfile
from collections.abc import Mapping
from pathlib import Path

from radixkv.config.regular_file import read_regular
from radixkv.errors import UnknownTokenizer
from radixkv.service.text.transformers_tokenizer import converted_files

# A tokenizer has at least one of these vocabularies.
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
_OTHER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
NAMES = (*_VOCABULARIES, *_OTHER_FILES)
# Templates for special cases, such as `tool_use.jinja`, are in a folder of this name.
TEMPLATES = "additional_chat_templates"
MAX_FILES = 50  # clients and routers accept no more

_EARLIEST_TIME = (1980, 1, 1, 0, 0, 0)  # that a zip archive can represent
# Files of the model's directory that the archive has in addition to those of a converted tokenizer.
_MODEL_FILES = ("config.json", "generation_config.json")

_logger = logging.getLogger(__name__)


def tokenizer_archive(directory: str | Path) -> bytes:
    """Return a zip archive of the files of a model directory that a tokenizer is loaded from.

    The files are stored uncompressed, sorted by name and without timestamps, so equal files give equal bytes with every
    version of every library. A directory without `tokenizer.json` is converted first, so that clients do not need
    transformers to read it; the bytes then depend on the version of transformers. Conversion takes seconds.

    Args:
        directory: a model directory.

    Raises:
        UnknownTokenizer: the directory has no vocabulary.
    """
    folder = Path(directory)
    files = {name: read_regular(folder / name) for name in NAMES if (folder / name).is_file()}
    if not set(files) & set(_VOCABULARIES):
        raise UnknownTokenizer("tokenizer: the model's directory has none; add its files, such as tokenizer.json")
    for path in sorted((folder / TEMPLATES).glob("*.jinja"))[: MAX_FILES - len(files)]:
        files[f"{TEMPLATES}/{path.name}"] = read_regular(path)
    if "tokenizer.json" not in files:
        converted = _convert(folder)
        if converted is not None:
            files = {name: files[name] for name in _MODEL_FILES if name in files} | converted
    return _zip(files)


def _convert(folder: Path) -> dict[str, bytes] | None:
    """Convert a tokenizer to `tokenizer.json` and its other files; None, with a warning, if that is not possible."""
    try:
        converted = converted_files(folder)
        reason = "tokenizer.json cannot represent it"
    except (ModuleNotFoundError, ValueError) as error:
        converted, reason = None, str(error)
    if converted is None:
        _logger.warning(
            "the tokenizer cannot be converted to tokenizer.json, so clients need transformers for text: %s", reason
        )
        return None
    return dict(converted)


def _zip(files: Mapping[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as zipped:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _EARLIEST_TIME)
            entry.create_system = 3  # Unix, on every platform
            entry.external_attr = 0o644 << 16
            zipped.writestr(entry, content)
    return archive.getvalue()
