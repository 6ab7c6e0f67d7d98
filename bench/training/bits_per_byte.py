"""Measures how well the embedded model predicts text that it was not trained on, compared with compressors and bigrams.

python -m bench.training.bits_per_byte --json bench/results/bits_per_byte.json

Compressors and bigrams are measured twice: without any training, and after reading the text that the model was trained
on. A bigram model keeps learning while it reads; the weights of the embedded model do not change.
"""

from __future__ import annotations

import argparse
import lzma
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.parts.result_file import write_result
from bench.training.bigram import Bigram
from bench.training.corpus import Document, held_out_documents, training_documents
from bench.training.model_bits import model_bits
from bench.training.tokenizer import load_tokenizer
from radixkv.model.tiny_files import CONFIG
from radixkv.model.tiny_model import build_tiny_model

_GZIP_WINDOW = 32_768  # bytes; the maximum distance of a match in gzip
_XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]  # its window holds 64 MB


def gzip_bits(text: bytes, before: bytes = b"") -> int:
    """Return the bits of a text compressed by deflate at the highest level, without headers.

    Args:
        text: the text to compress.
        before: a text that the compressor and the decompressor know; its last 32 KiB are the dictionary.
    """
    dictionary = before[-_GZIP_WINDOW:]
    compressor = zlib.compressobj(9, wbits=-15, zdict=dictionary) if dictionary else zlib.compressobj(9, wbits=-15)
    return 8 * len(compressor.compress(text) + compressor.flush())


def xz_bits(text: bytes, before: bytes = b"") -> int:
    """Return the bits that a text adds to a text compressed before it, by LZMA2 at the highest level, without headers.

    Args:
        text: the text to compress.
        before: a text of up to 64 MB that compressor and decompressor know.
    """
    return _compressed_xz_bits(before + text) - (_compressed_xz_bits(before) if before else 0)


def _compressed_xz_bits(text: bytes) -> int:
    return 8 * len(lzma.compress(text, format=lzma.FORMAT_RAW, filters=_XZ_FILTERS))


COMPRESSORS: Mapping[str, Callable[[bytes, bytes], int]] = {"gzip -9": gzip_bits, "xz -9e": xz_bits}


@dataclass(frozen=True, slots=True)
class PredictorRow:
    """Bits that one predictor needs.

    Attributes:
        predictor: its name.
        knows_training_text: whether it has read the training text.
        bits_per_byte: bits per byte by title of the held-out document.
        all: bits per byte of all documents together.
    """

    predictor: str
    knows_training_text: bool
    bits_per_byte: dict[str, float]
    all: float

    @classmethod
    def of(
        cls, predictor: str, knows_training_text: bool, bits: list[float], documents: list[Document]
    ) -> PredictorRow:
        """Divide the bits of each document by its bytes."""
        sizes = [len(document.text.encode()) for document in documents]
        by_title = {
            document.title: num_bits / size for document, num_bits, size in zip(documents, bits, sizes, strict=True)
        }
        return cls(predictor, knows_training_text, by_title, sum(bits) / sum(sizes))


def measure(held_out: list[Document], training: list[Document]) -> Iterator[PredictorRow]:
    """Yield two rows for each compressor and for bigrams, without and with the training text, and one for the model."""
    training_text = "\f".join(document.text for document in training).encode()
    for name, compressed_bits in COMPRESSORS.items():
        for known_text in (b"", training_text):
            bits = [float(compressed_bits(document.text.encode(), known_text)) for document in held_out]
            yield PredictorRow.of(name, bool(known_text), bits, held_out)

    tokenizer = load_tokenizer()
    document_end = tokenizer.pad_token_id
    held_out_ids = [[document_end, *tokenizer.encode(document.text)] for document in held_out]
    training_ids = [token for document in training for token in (document_end, *tokenizer.encode(document.text))]
    for known_ids in ([], training_ids):
        bigram = Bigram(CONFIG["vocab_size"])
        bigram.learn(known_ids)
        bits = [bigram.copy().bits(ids) for ids in held_out_ids]
        yield PredictorRow.of("bigram of tokens", bool(known_ids), bits, held_out)

    module = build_tiny_model("sdpa").eval()
    bits = [model_bits(module, torch.tensor(ids)) for ids in held_out_ids]
    yield PredictorRow.of("tiny", True, bits, held_out)


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description="Measure bits per byte of held-out text.")
    parser.add_argument(
        "--characters", type=int, help="number of characters to read of each held-out document (default: all)"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    held_out = [Document(each.source, each.text[: options.characters]) for each in held_out_documents()]
    rows = []
    for row in measure(held_out, training_documents()):
        rows.append(row)
        training = "after the training text" if row.knows_training_text else "alone"
        by_title = ", ".join(f"{title} {bits:.3f}" for title, bits in row.bits_per_byte.items())
        print(f"{row.predictor:>16} {training:>24}: {row.all:.3f} bits per byte ({by_title})", flush=True)
    write_result(options.json, "bench.training.bits_per_byte", None, {"rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
