"""Learns the merges of the embedded model's tokenizer.

python -m bench.training.merges      # prints the merges that are in `radixkv/model/tiny_files.py`
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from bench.training.corpus import training_documents

NUM_MERGES = 253  # 256 single bytes, 253 merged tokens and 3 special tokens make a vocabulary of 512


def learn_merges(texts: Iterable[str], num_merges: int = NUM_MERGES) -> list[tuple[str, str]]:
    """Return the pairs that are merged into one token, the most frequent first; `_` stands for a space.

    Args:
        texts: the training texts, which must not contain `_` or `+`.
        num_merges: number of merges.
    """
    byte_characters = ByteLevel.alphabet()  # the tokenizer writes each byte as one of these characters
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=len(byte_characters) + num_merges,
        initial_alphabet=sorted(byte_characters),
        show_progress=False,
        special_tokens=[],
    )
    tokenizer.train_from_iterator(texts, trainer)
    pairs = json.loads(tokenizer.to_str())["model"]["merges"]
    space = ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    return [(left.replace(space, "_"), right.replace(space, "_")) for left, right in pairs]


def main() -> None:
    """Print the merges in lines of at most 116 columns."""
    pairs = learn_merges(document.text for document in training_documents())
    print(
        textwrap.fill(" ".join("+".join(pair) for pair in pairs), 116, initial_indent="    ", subsequent_indent="    ")
    )


if __name__ == "__main__":
    main()
