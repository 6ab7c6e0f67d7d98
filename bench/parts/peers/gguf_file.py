"""Writes a float32 Llama checkpoint as a GGUF file, for llama.cpp. Runs in llama.cpp's environment.

python -m bench.parts.peers.gguf_file DIRECTORY float32|bfloat16 FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3  # types of tokens in GGUF
_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    """Translate the name of a weight from transformers' to GGUF's."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, index, part = stem.split(".", 3)
        return f"blk.{index}.{_GGUF_NAMES[part]}.weight"
    return f"{_GGUF_NAMES[stem]}.weight"


def interleave(weight: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Reorder rows of a query or key projection, [num_heads * head_dim, hidden], from halves to pairs for RoPE."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def vocabulary(size: int) -> tuple[list[str], list[int]]:
    """Return `size` tokens and their types: unknown, begin, end, then invented words.

    There are no byte tokens, since the server does not send a token that ends within a UTF-8 character.
    """
    words = [f"\u2581w{index}" for index in range(3, size)]
    return ["<unk>", "<s>", "</s>", *words], [_UNKNOWN, _CONTROL, _CONTROL] + [_NORMAL] * len(words)


def main(directory: str, dtype: str, file: str) -> None:
    """Write the weights in a dtype; norms are always float32, as llama.cpp requires."""
    import gguf
    from safetensors import safe_open

    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    is_bfloat16 = dtype == "bfloat16"
    tensor_type = gguf.GGMLQuantizationType.BF16 if is_bfloat16 else gguf.GGMLQuantizationType.F32
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if is_bfloat16 else gguf.LlamaFileType.ALL_F32)
    tokens, token_types = vocabulary(config["vocab_size"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types(token_types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    num_heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    with safe_open(Path(directory) / "model.safetensors", framework="np") as weights:
        for name in weights.keys():  # noqa: SIM118 - `weights` is no dict
            weight = weights.get_tensor(name)
            heads = num_heads.get(name.split(".")[-2])
            if heads:
                weight = interleave(weight, heads)
            if weight.ndim == 1 or not is_bfloat16:
                writer.add_tensor(gguf_name(name), np.ascontiguousarray(weight))
            else:
                writer.add_tensor(
                    gguf_name(name),
                    gguf.quants.quantize(np.ascontiguousarray(weight), tensor_type),
                    raw_dtype=tensor_type,
                )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
