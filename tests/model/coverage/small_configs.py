"""Small configurations of causal models, and the engines that serve their architectures."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.model.exact.checkpoints import SHAPE

# Classes for text in vLLM's registry of models, read in November 2026; `PhiMoE` is spelled differently there.
VLLM = frozenset(
    """
    AXK1ForCausalLM AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM BambaForCausalLM BloomForCausalLM
    Cohere2ForCausalLM Cohere2MoeForCausalLM CohereForCausalLM CwmForCausalLM DbrxForCausalLM
    DeepseekV2ForCausalLM DeepseekV32ForCausalLM DeepseekV3ForCausalLM DeepseekV4ForCausalLM Dots1ForCausalLM
    Dots3NoteForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM Exaone4ForCausalLM ExaoneMoeForCausalLM
    FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM FlexOlmoForCausalLM GPT2LMHeadModel
    GPTBigCodeForCausalLM GPTJForCausalLM GPTNeoXForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM
    Gemma3nForCausalLM Gemma4ForCausalLM GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM
    Glm4MoeLiteForCausalLM GlmForCausalLM GlmMoeDsaForCausalLM GptOssForCausalLM GraniteForCausalLM
    GraniteMoeForCausalLM GraniteMoeHybridForCausalLM GraniteMoeSharedForCausalLM HYV3ForCausalLM
    HrmTextForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM HyperCLOVAXForCausalLM
    IQuestCoderForCausalLM InklingForCausalLM InternLM3ForCausalLM Jais2ForCausalLM JambaForCausalLM
    KimiLinearForCausalLM LagunaForCausalLM Lfm2ForCausalLM Lfm2MoeForCausalLM Llama4ForCausalLM
    LlamaForCausalLM LongcatFlashForCausalLM Mamba2ForCausalLM MambaForCausalLM MellumForCausalLM
    MiMoV2FlashForCausalLM MiniCPM3ForCausalLM MiniMaxForCausalLM MiniMaxM2ForCausalLM Ministral3ForCausalLM
    MistralForCausalLM MixtralForCausalLM MptForCausalLM NemotronForCausalLM NemotronHForCausalLM OPTForCausalLM
    Olmo2ForCausalLM Olmo3ForCausalLM OlmoForCausalLM OlmoHybridForCausalLM OlmoeForCausalLM
    PersimmonForCausalLM Phi3ForCausalLM PhiForCausalLM PhimoeForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM
    Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM SeedOssForCausalLM SmolLM3ForCausalLM
    StableLmForCausalLM Starcoder2ForCausalLM Zamba2ForCausalLM
    """.split()  # noqa: SIM905
)

# Entry classes of SGLang 0.5.23, as far as transformers has them; two are spelled there as `Ernie4_5_` and `PhiMoE`.
SGLANG = frozenset(
    """
    AfmoeForCausalLM ApertusForCausalLM ArceeForCausalLM BeamForCausalLM Cohere2ForCausalLM
    Cohere2MoeForCausalLM CohereForCausalLM DbrxForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM
    DeepseekV3ForCausalLM DeepseekV4ForCausalLM Dots3NoteForCausalLM Ernie4_5ForCausalLM Ernie4_5_MoeForCausalLM
    Exaone4ForCausalLM ExaoneMoeForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM GPT2LMHeadModel
    GPTBigCodeForCausalLM GPTJForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration
    Gemma3nForCausalLM Gemma3nForConditionalGeneration Gemma4AssistantForCausalLM Gemma4ForCausalLM
    Gemma4ForConditionalGeneration Gemma4UnifiedAssistantForCausalLM Gemma4UnifiedForConditionalGeneration
    GemmaForCausalLM Glm4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GlmMoeDsaForCausalLM
    GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM GraniteMoeHybridForCausalLM
    GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM GraniteSWAForCausalLM HYV3ForCausalLM HYV4ForCausalLM
    HrmTextForCausalLM HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM KimiLinearForCausalLM LagunaForCausalLM
    Lfm2ForCausalLM Lfm2MoeForCausalLM Llama4ForCausalLM LlamaForCausalLM LongcatFlashForCausalLM
    Mamba2ForCausalLM MambaForCausalLM MellumForCausalLM MiMoV2FlashForCausalLM MiniCPM3ForCausalLM
    MiniMaxM2ForCausalLM Ministral3ForCausalLM MistralForCausalLM MixtralForCausalLM NemotronHForCausalLM
    OPTForCausalLM Olmo2ForCausalLM OlmoForCausalLM OlmoeForCausalLM PersimmonForCausalLM Phi3ForCausalLM
    PhiForCausalLM PhimoeForCausalLM Qwen2ForCausalLM Qwen2MoeForCausalLM Qwen3ForCausalLM Qwen3MoeForCausalLM
    Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM StableLmForCausalLM Starcoder2ForCausalLM
    ZayaForCausalLM
    """.split()  # noqa: SIM905
)

NUM_LAYERS = 3

# Values for all model types whose configuration has such a key.
_COMMON_VALUES: dict[str, Any] = {
    **SHAPE,
    "init_std": 0.2,
    "head_dim": 16,
    "sliding_window": 24,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}

# Latent attention: all heads read one latent, and `head_dim` is that of the rotated part.
_LATENT = {"num_key_value_heads": 4, "head_dim": 8}

_VALUES_BY_TYPE: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": {**_LATENT, "n_routed_experts": 8, "n_group": 4, "topk_group": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 300,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95] + 4 * [0.0],
    },
    "gemma4_text": {"global_head_dim": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300},
    "laguna": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "num_attention_heads_per_layer": [4, 2, 8],
    },
    "mellum": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "glm4_moe_lite": _LATENT,
    "gptj": {"rotary_dim": 8},
    "longcat_flash": {
        **_LATENT,
        "num_layers": 2,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 48,
        "zero_expert_num": 2,
    },
    "mamba2": {"num_heads": 8},
    "mimo_v2_flash": {"head_dim": 24},
    "minicpm3": _LATENT,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 32},
    "phimoe": {"sliding_window": None},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "sarvam_mla": _LATENT,
    "zaya": {"num_experts_per_tok": 1},
}


def covered_types() -> list[str]:
    """List the text-only causal model types of transformers that vLLM or SGLang serves."""
    return sorted(
        model_type
        for model_type, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if architecture in VLLM | SGLANG
        and CONFIG_MAPPING[model_type].model_type == model_type
        and not {"text_config", "vision_config", "audio_config"} & set(CONFIG_MAPPING[model_type].sub_configs)
    )


def small_config(model_type: str) -> PretrainedConfig:
    """Make a configuration of some thousand parameters with a layer of each kind that the type has by default."""
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    own_names = config_class.attribute_map
    keys = set(default.to_dict()) | set(own_names)
    values = {own_names.get(key, key): value for key, value in _COMMON_VALUES.items() if key in keys}
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if len(kinds) > 1 and "layer_types" in keys:
        values["layer_types"] = [kinds[layer % len(kinds)] for layer in range(NUM_LAYERS)]
    return config_class(**values | _VALUES_BY_TYPE.get(model_type, {}))
