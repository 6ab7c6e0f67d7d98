"""Which models can reuse K/V, and what a forward pass may depend on besides tokens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import DynamicCache, PreTrainedModel

from radixkv.errors import InvalidRequest, UnsupportedModel

# Layers of a `DynamicCache` whose only state is the K/V of tokens. A DummyLayer keeps nothing.
_ATTENTION_LAYERS = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"})

# Types whose classes in transformers 5.24 compute other logits after a cache was continued with several tokens.
_WRONG_AFTER_A_PREFIX = frozenset({"mpt"})

# The names of the cache in calls of `generate` and `forward`: in transformers 5.24, and in 5.17.
CACHE_NAMES = ("cache", "past_key_values")

# Arguments of a forward pass that K/V do not depend on, or that `PromptCache` verifies.
_HARMLESS_ARGUMENTS = frozenset(
    {
        *CACHE_NAMES,
        "input_ids",
        "attention_mask",
        "position_ids",
        "cache_position",
        "use_cache",
        "logits_to_keep",
        "labels",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)


def require_reusable(model: object) -> None:
    """Refuse a model that cannot continue correctly from the K/V of the tokens of a prefix alone.

    Raises:
        UnsupportedModel: the message names the model and the reason.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "generate"):
        raise UnsupportedModel(
            f"{name}: expected a model of transformers with a method generate, got another object; of a model that is "
            "wrapped by PEFT, pass model.get_base_model()"
        )
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name}: K/V of an encoder-decoder model depend on the input of its encoder")
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModel(f"{name}: with bidirectional attention, K/V of a token depend on later tokens")
    if config.model_type in _WRONG_AFTER_A_PREFIX:
        raise UnsupportedModel(f"{name}: transformers computes other results for it after a prefix is given")
    cache = None if model._is_stateful else DynamicCache(config=config)
    kinds = {"recurrent states"} if cache is None else {type(each).__name__ for each in cache.layers}
    unsupported_kinds = sorted(kinds - _ATTENTION_LAYERS)
    if unsupported_kinds:
        raise UnsupportedModel(
            f"{name}: expected layers that keep only K/V of full or sliding attention, got "
            f"{', '.join(unsupported_kinds)}"
        )


def cache_name(model: PreTrainedModel) -> str:
    """Return the name of the cache among the arguments of the model."""
    names = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[0])


def require_only_tokens(arguments: Mapping[str, Any]) -> None:
    """Refuse a forward pass whose K/V depend on more than its tokens.

    Raises:
        InvalidRequest: the message names the argument.
    """
    names = sorted(name for name, value in arguments.items() if value is not None and name not in _HARMLESS_ARGUMENTS)
    if names:
        raise InvalidRequest(
            f"RadixCache: expected a forward pass of input_ids only, got {', '.join(names)}, on which K/V may depend"
        )
