"""Small tokenizers of the kinds that models have, made on the spot."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixkv.model.tiny_files import write_tiny_files
from radixkv.service.text.tokenizer import Tokenizer


@functools.cache
def byte_level() -> Tokenizer:
    """The embedded model's: pieces of bytes."""
    with tempfile.TemporaryDirectory() as name:
        write_tiny_files(Path(name))
        return Tokenizer.load(name)


@functools.cache
def byte_fallback() -> Tokenizer:
    """As Llama 2 has: words that begin with a blank, and a token for each byte of other characters."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "▁Hello", "▁world", "Hello", ",", "a", "b", "▁a", "▁b", "é"]
    vocabulary = {word: token_id for token_id, word in enumerate(words)}
    rust = Rust(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=rust, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    )
