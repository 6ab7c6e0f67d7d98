"""Files of the embedded model without its weights: config.json, and a tokenizer of 512 tokens with a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 131_072,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "eos_token_id": [509, 511],  # the ends of a document and of a turn
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # the last ids

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# BPE merges, in the order in which they are applied; `_` is a space. Learned by `python -m bench.training.merges`.
_MERGES = """
    _+t h+e _+a _t+he i+n _+s n+d _+w _+o r+e h+a o+u _+b _a+nd _o+f e+r _+m i+t i+s _+f o+n _+c e+n l+l o+r e+d
    _t+o _+he _+h in+g e+s _+d _+n _+in _+p _b+e a+r _+ha a+s a+n a+t _t+h _+l o+m ha+t o+t _+u _+I _+y _+g _+e l+e
    _t+hat v+e l+d s+e i+m u+t e+t i+d s+t _f+or a+y g+h v+er _n+ot it+h c+h _he+r o+w c+e _w+as _+it en+t _y+ou
    _h+is A+nd i+r _+re l+y _s+ha i+on he+r _w+ith t+o _w+h _u+n gh+t _a+s _+is r+i _s+a o+d _h+im _+M _sha+ll _o+n
    t+h _w+e _+L _a+n r+a i+ll e+l _s+he _+k _a+ll ou+ld a+d a+m t+er _the+m _un+to _the+y o+re _ha+ve _m+e u+r a+l
    _ha+d a+in _th+ou a+k _wh+i es+s _+J _m+y r+o T+he c+t _s+e _a+t _whi+ch _c+om O+R OR+D _L+ORD es+t i+f _+S
    ver+y _s+u _u+p a+nd r+om _s+o i+l re+d _+G _s+t _w+ill _b+ut _the+re _f+rom or+d _sa+id a+b _c+on _the+ir _+E
    -+- _w+he at+ion _b+y v+en '+s _g+o _m+an _+H p+e i+ght _y+e _we+re _+B u+s _+A _d+e et+h se+l ou+r f+ore _d+o
    _th+y _n+e u+l _a+l a+ll ar+t an+t _M+r i+c _a+re .+" ar+d i+ve q+u o+s _a+g _th+is _n+o in+e h+i _G+od o+k am+e
    _+C _m+u _a+m p+p ak+e _you+r a+h _+v _whe+n re+n _the+e g+e _k+n at+her _o+ut ha+n _s+ay a+u _+W as+t l+i er+s
    on+g re+s r+ou _+very ing+s _a+f sel+f _d+ay _s+on _e+x _f+e p+le _s+h p+t _ag+ain _a+b _on+e _o+r _l+o _s+p
    _w+ould e+m _c+ould it+y _an+y _I+s
"""


def merges() -> list[tuple[str, str]]:
    """Return the BPE merges in the order in which they are applied."""
    return [(left, right) for left, right in (pair.split("+") for pair in _MERGES.split())]


def write_tiny_files(directory: Path) -> None:
    """Write config.json, tokenizer.json and tokenizer_config.json, with the same bytes each time.

    Ids 0 to 255 are the bytes of those values, 256 to 508 frequent pieces of English text, and 509 to 511 the
    special tokens. The chat template is ChatML's.

    Args:
        directory: an existing directory.
    """
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **CONFIG}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    files = {"config.json": config, "tokenizer.json": _tokenizer(), "tokenizer_config.json": tokenizer_config}
    for name, tree in files.items():
        (directory / name).write_bytes(json.dumps(tree, indent=1).encode("ascii"))


def _tokenizer() -> dict[str, Any]:
    """Return a byte-level BPE in the format of tokenizer.json."""
    letters = _letters_of_bytes()
    space = letters[ord(" ")]
    pairs = [[left.replace("_", space), right.replace("_", space)] for left, right in merges()]
    pieces = [*letters, *("".join(pair) for pair in pairs)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special_tokens = [
        {
            "id": len(pieces) + index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(SPECIAL_TOKENS)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special_tokens,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {piece: token_id for token_id, piece in enumerate((*pieces, *SPECIAL_TOKENS))},
            "merges": pairs,
        },
    }


def _letters_of_bytes() -> list[str]:
    """Return the character that represents each byte in a byte-level vocabulary: printable bytes themselves."""
    printable = {*range(ord("!"), 127), *range(161, 173), *range(174, 256)}
    unused_code_points = iter(range(256, 512))
    return [chr(byte if byte in printable else next(unused_code_points)) for byte in range(256)]
