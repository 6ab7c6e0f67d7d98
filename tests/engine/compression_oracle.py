"""The reference for compressed generations: the model and cache of transformers, with entries left out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import avg_pool1d
from transformers import DynamicCache, PreTrainedModel

from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.integrations.transformers.model_requirements import cache_name

_H2O_QUERIES = 64  # H2O weighs the entries of a prompt by the attention of at most this many of its last queries


@dataclass
class Layer:
    """The kept entries of one layer, by KV head: their positions, and the attention that each has received so far."""

    positions: list[list[int]]
    masses: list[list[float]] = field(default_factory=list)


def oracle_logits(model: PreTrainedModel, ids: list[int], answer: list[int], compression: Compression) -> torch.Tensor:
    """Return the logits after the prompt and after each token of an answer but its last, `[num_answer, vocab_size]`."""
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        cached = {cache_name(model): cache}
        out = model(torch.tensor([ids]), use_cache=True, output_attentions=True, **cached)
        rows = [out.logits[0, -1]]
        layers = [_compress_prompt(weights[0], cache, compression) for weights in out.attentions]
        for index, layer in enumerate(layers):
            all_positions = [list(range(len(ids)))] * len(layer.positions)
            _keep_only(cache, index, all_positions, layer.positions)
        for number, token in enumerate(answer[:-1]):
            position = len(ids) + number
            for index, layer in enumerate(layers):
                positions_before = layer.positions
                _drop_if_full(layer, position, compression)
                _keep_only(cache, index, positions_before, layer.positions)
            out = model(
                torch.tensor([[token]]),
                position_ids=torch.tensor([[position]]),
                use_cache=True,
                output_attentions=True,
                **cached,
            )
            rows.append(out.logits[0, -1])
            for layer, weights in zip(layers, out.attentions, strict=True):
                mass_by_head = weights[0, :, -1].view(len(layer.positions), -1, weights.shape[-1]).sum(1)
                layer.positions = [[*row, position] for row in layer.positions]
                layer.masses = [
                    [
                        old_mass + float(new_mass)
                        for old_mass, new_mass in zip([*old_masses, 0.0], new_masses, strict=True)
                    ]
                    for old_masses, new_masses in zip(layer.masses, mass_by_head, strict=True)
                ]
    return torch.stack(rows)


def _compress_prompt(weights: torch.Tensor, cache: DynamicCache, compression: Compression) -> Layer:
    """Choose the kept entries of a prompt, given its attention weights `[num_query_heads, num_tokens, num_tokens]`."""
    num_tokens = weights.shape[-1]
    num_kv_heads = cache.layers[0].keys.shape[1]
    num_kept = min(compression.max_tokens, num_tokens)
    num_observed = (
        compression.recent if compression.policy is CompressionPolicy.SNAPKV else min(compression.recent, _H2O_QUERIES)
    )
    mass = weights[:, -num_observed:].sum(1).view(num_kv_heads, -1, num_tokens).sum(1)  # [num_kv_heads, num_tokens]
    if num_kept == num_tokens:
        positions = [list(range(num_tokens))] * num_kv_heads
    elif compression.policy is CompressionPolicy.STREAMING_LLM:
        window = num_kept - compression.sinks
        positions = [[*range(compression.sinks), *range(num_tokens - window, num_tokens)]] * num_kv_heads
    else:
        older_mass = mass[:, : num_tokens - compression.recent]
        if compression.policy is CompressionPolicy.SNAPKV:
            older_mass = avg_pool1d(older_mass, 5, stride=1, padding=2)
        heaviest = older_mass.topk(num_kept - compression.recent).indices.sort().values.tolist()
        positions = [[*row, *range(num_tokens - compression.recent, num_tokens)] for row in heaviest]
    masses = [[float(mass[head, position]) for position in row] for head, row in enumerate(positions)]
    return Layer(positions, masses)


def _drop_if_full(layer: Layer, next_position: int, compression: Compression) -> None:
    """Drop an entry of each head if there is no room for the next token."""
    if compression.policy is CompressionPolicy.SNAPKV or len(layer.positions[0]) < compression.max_tokens:
        return
    rows = list(zip(layer.positions, layer.masses, strict=True))
    layer.positions, layer.masses = [], []
    for positions, masses in rows:
        droppable = [
            index
            for index, position in enumerate(positions)
            if compression.sinks <= position <= next_position - compression.recent
        ]
        scores = positions if compression.policy is CompressionPolicy.STREAMING_LLM else masses
        dropped = min(droppable, key=scores.__getitem__)
        layer.positions.append(positions[:dropped] + positions[dropped + 1 :])
        layer.masses.append(masses[:dropped] + masses[dropped + 1 :])


def _keep_only(cache: DynamicCache, index: int, held: list[list[int]], wanted: list[list[int]]) -> None:
    """Remove all positions but the wanted ones from a layer of the cache, which holds the positions `held`."""
    layer = cache.layers[index]
    indices_by_head = [
        [held_positions.index(position) for position in wanted_positions]
        for held_positions, wanted_positions in zip(held, wanted, strict=True)
    ]
    indices = torch.tensor(indices_by_head)
    layer.keys, layer.values = (
        each.gather(2, indices[None, :, :, None].expand(-1, -1, -1, each.shape[-1]))
        for each in (layer.keys, layer.values)
    )
