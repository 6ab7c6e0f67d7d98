"""The training text of the embedded model, five novels and 65 books of the Bible, and two held-out documents."""

from __future__ import annotations

import lzma
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "corpus"
_TRAINING_SOURCES = ("austen", "king_james")
_HELD_OUT_SOURCE = "held_out"


@dataclass(frozen=True, slots=True)
class Document:
    """A novel, or a book of the Bible.

    Attributes:
        source: name of the corpus file that contains it, without `.txt.xz`.
        text: paragraphs, separated by empty lines; each verse of a chapter is a line.
    """

    source: str
    text: str

    @property
    def title(self) -> str:
        """The document's first line."""
        return self.text.split("\n", 1)[0]

    @property
    def paragraphs(self) -> list[str]:
        """The paragraphs, in order."""
        return [paragraph.strip() for paragraph in self.text.split("\n\n") if paragraph.strip()]


def training_documents() -> list[Document]:
    """Read the documents that the model is trained on, 7.6 MB."""
    return [document for source in _TRAINING_SOURCES for document in _read(source)]


def held_out_documents() -> list[Document]:
    """Read the documents that the model is evaluated on, 0.6 MB. They are not part of the training documents."""
    return _read(_HELD_OUT_SOURCE)


def _read(source: str) -> list[Document]:
    """Read the documents of a file, which are separated by form feeds."""
    text = lzma.decompress((FOLDER / f"{source}.txt.xz").read_bytes()).decode()
    return [Document(source, part) for part in text.split("\f")]
