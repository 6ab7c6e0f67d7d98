"""Files of the embedded model beside its weights: config.json, and a tokenizer of 512 tokens with a chat template."""

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
    "initializer_range": 0.08,  # wide enough that every token changes the answer
    "tie_word_embeddings": False,
    "eos_token_id": None,  # it was not trained to end
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # the last ids

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Pairs that become one token, the first ones first; `_` is a space. Learned from the prose of this repository.
_MERGES = """
    _+t _+a h+e _+o r+e _+s _+i e+s e+r _+w _t+he n+d _+b a+t _+c e+n _+f _+p t+s i+n e+d _+m _+. _+l o+r o+n _a+nd _o+f
    i+t r+o _+n _o+n _t+h _+re a+c _i+n _+e _+- _t+o _s+t a+d _+, l+o a+n a+s _i+s d+e in+g _+h _+r _c+o i+c _n+o a+r
    l+l _w+h it+h _th+at i+on c+k e+p q+u .+. s+t v+er _+A _w+ith k+en u+n m+p _f+or _b+e o+u m+e l+e _+d _+g _+T _on+e
    _+: _p+ro _st+ep _+k _m+o t+h _to+ken lo+ck u+s _a+re _b+lock _i+t es+t a+l i+x c+h _i+ts _a+t a+y _a+n en+t es+ts
    er+s _re+qu l+d ac+h in+e u+t _l+e _s+er e+l k+v i+s p+y _f+i ad+ix _r+adix _radix+kv _+ro _s+o _l+o _no+t _token+s
    o+re _T+he e+t t+er '+s _mo+de i+ts v+ic g+h _s+h v+e _+de _o+r ..+.. _wh+at i+m _r+un a+p he+r _b+y en+g _e+ach s+e
    u+l _s+e _n+e c+e _block+s a+k _a+s a+me nd+s ac+he es+s l+y o+l _+eng _co+mp _h+as a+re f+ore u+m w+s _f+ro _e+x
    _requ+ests c+o t+her u+r _t+w _p+l _mode+l n+el t+i _+W _t+r _be+fore vic+e _eng+ine _fro+m c+t y+th _c+h lo+at
    ent+ion a+ll er+nel _wh+o at+ion _c+ache _k+ernel _w+he a+in t+ention _a+ll _pro+mp _th+re ac+t _step+s g+e i+le
    _o+ver f+ter i+l _+he _a+l _w+a _b+en _ben+ch o+p on+g ou+t _d+o r+st _t+en or+t ar+t _requ+est _tw+o u+p w+n
    _a+fter _s+ame _w+e _p+o _on+ly as+t _fi+rst a+m at+e _m+e _k+e _+O a+nd _+C _+N _+R _+S _+qu _the+m us+e i+gh _w+as
    _c+all _e+ver th+ing _comp+ut yth+on i+es p+e s+w
"""


def write_tiny_files(directory: Path) -> None:
    """Write config.json, tokenizer.json and tokenizer_config.json, with the same bytes each time.

    Ids 0 to 255 are the bytes of those values, 256 to 508 frequent pieces of English text, the last three special
    tokens. The chat template is ChatML's.

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
    """A byte-level BPE in the format of tokenizer.json."""
    letters = _letters_of_bytes()
    merges = [pair.replace("_", letters[ord(" ")]).split("+") for pair in _MERGES.split()]
    pieces = [*letters, *("".join(pair) for pair in merges)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    special = [
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
        "added_tokens": special,
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
            "merges": merges,
        },
    }


def _letters_of_bytes() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: printable ones for themselves."""
    printable = {*range(ord("!"), 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
