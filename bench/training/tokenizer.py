"""The embedded model's tokenizer, for texts of any length."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from radixkv.model.tiny_files import write_tiny_files


def load_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer, without its warning about long texts."""
    with TemporaryDirectory() as folder:
        write_tiny_files(Path(folder))
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, model_max_length=10**9)
