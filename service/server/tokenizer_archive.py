"""The files of a model's tokenizer as one zip."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from radixkv.errors import UnknownTokenizer

# A tokenizer has at least one of these: the pieces of text that its ids stand for.
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
_OTHERS = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
NAMES = (*_VOCABULARIES, *_OTHERS)

_LONG_AGO = (1980, 1, 1, 0, 0, 0)


def tokenizer_archive(directory: str | Path) -> bytes:
    """Zip the files of a model directory that a tokenizer is loaded from, without subfolders.

    The files are stored, not compressed, in the order of their names and without times: equal files give equal bytes
    with every version of every library.

    Args:
        directory: a model directory.

    Raises:
        UnknownTokenizer: there is no vocabulary in it.
    """
    folder = Path(directory)
    names = [name for name in sorted(NAMES) if (folder / name).is_file()]
    if not set(names) & set(_VOCABULARIES):
        raise UnknownTokenizer("tokenizer: expected one in the model's directory, such as tokenizer.json, got none")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as zipped:
        for name in names:
            entry = zipfile.ZipInfo(name, _LONG_AGO)
            entry.create_system = 3  # as on Unix, wherever it is made
            entry.external_attr = 0o644 << 16
            zipped.writestr(entry, (folder / name).read_bytes())
    return archive.getvalue()
