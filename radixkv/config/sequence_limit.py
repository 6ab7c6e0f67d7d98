"""The longest sequence that is served, and why it is shorter than what the files of a model state.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")
_LONGROPE = ("longrope", "su")  # `su` in older files


class SequenceLimit(NamedTuple):
    """Maximum length of a sequence. Up to this length, the K/V of a token depend only on the token and those before it.

    Attributes:
        max_tokens: the maximum; None if the configuration states none.
        stated_tokens: the length that config.json states or that its RoPE scaling implies; None if it states none.
        reason: why longer sequences are not served although the files may allow them, as a clause; empty if the maximum
            is `stated_tokens`.
        remedy: how to serve longer sequences, as a clause; empty if that is not possible.
    """

    max_tokens: int | None = None
    stated_tokens: int | None = None
    reason: str = ""
    remedy: str = ""

    @property
    def explanation(self) -> str:
        """Reason and remedy in one line; empty if there is no reason."""
        return f"{self.reason}; {self.remedy}" if self.reason else ""


NO_LIMIT = SequenceLimit()


def sequence_limit(config: Mapping[str, Any]) -> SequenceLimit:
    """Return the maximum sequence length of a model.

    With two variants of RoPE, dynamic scaling and longrope, the rotation of every token depends on the length of the
    sequence if that exceeds a limit. Cached K/V would then be wrong.

    Args:
        config: the entries of config.json, or of its section for the text model if it has one. `rope_parameters` may
            also have its former name, `rope_scaling`.
    """
    stated = next((config[name] for name in _LENGTH_NAMES if is_length(config.get(name))), None)
    limits = [SequenceLimit(stated, stated)]
    for rope in _ropes(config):
        kind = rope.get("rope_type") or rope.get("type")
        if kind == "dynamic":
            limits.append(_dynamic(rope, stated))
        elif kind in _LONGROPE or "long_factor" in rope:
            limits.append(_longrope(rope, config, stated))
    limits = [limit for limit in limits if limit.max_tokens is not None]
    # Of several limits with the same maximum, one with a reason is returned.
    return min(limits, key=lambda limit: (limit.max_tokens, not limit.reason), default=NO_LIMIT)


def use_long_factors(config: Mapping[str, Any]) -> bool:
    """Make the RoPE tables of a configuration use their long factors at all positions. Return whether there are any.

    This changes the K/V of every token. The tables are changed in place, so that a fingerprint of the configuration
    includes the change.
    """
    is_longrope = False
    for rope in _ropes(config):
        if "long_factor" in rope:
            is_longrope = True
            rope["short_factor"] = list(rope["long_factor"])
            if "long_mscale" in rope:
                rope["short_mscale"] = rope["long_mscale"]
    return is_longrope


def is_length(value: object) -> TypeGuard[int]:
    """Return whether a value is a number of tokens. Some tokenizers state a number like 1e30 for no limit."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31


def _ropes(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Iterate over the RoPE tables: one for all layers, or one by kind of layer."""
    table = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(table, dict):
        tables_by_kind = [value for value in table.values() if isinstance(value, dict)]
        yield from tables_by_kind or [table]


def _dynamic(rope: Mapping[str, Any], stated: int | None) -> SequenceLimit:
    unscaled_tokens, factor = rope.get("max_position_embeddings"), rope.get("factor")
    max_tokens = unscaled_tokens if is_length(unscaled_tokens) else stated
    if max_tokens is None:
        return NO_LIMIT
    scaled_tokens = stated or max_tokens
    if isinstance(factor, int | float) and 1 < factor < 2**31:
        scaled_tokens = max(scaled_tokens, int(max_tokens * factor))
    if scaled_tokens <= max_tokens:
        return SequenceLimit(max_tokens, stated)
    reason = f"dynamic RoPE scaling changes the K/V of every token in sequences of more than {max_tokens} tokens"
    return SequenceLimit(
        max_tokens, scaled_tokens, reason, "a rope_type such as yarn or linear in config.json does not"
    )


def _longrope(rope: Mapping[str, Any], config: Mapping[str, Any], stated: int | None) -> SequenceLimit:
    original_key = "original_max_position_embeddings"
    lengths = (config.get(original_key), rope.get(original_key), stated)
    max_tokens = next((length for length in lengths if is_length(length)), None)
    has_same_factors = rope.get("short_factor") == rope.get("long_factor")
    has_same_mscale = rope.get("short_mscale") == rope.get("long_mscale")
    if (has_same_factors and has_same_mscale) or max_tokens is None or (stated is not None and max_tokens >= stated):
        return SequenceLimit(stated, stated)
    return SequenceLimit(
        max_tokens,
        stated,
        f"longrope changes the K/V of every token in sequences of more than {max_tokens} tokens",
        'model.longrope = "long" uses the factors of long sequences for all',
    )
