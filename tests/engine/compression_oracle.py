"""The reference for compressed generations: the model and cache of transformers, with entries left out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import avg_pool1d
from transformers import DynamicCache, PreTrainedModel

from bench.parts.peers.cache_keyword import cache_keyword
from radixkv.api.compression import Compression, CompressionPolicy

_H2O_QUERIES = 64


@dataclass
class Layer:
    """Entries of one layer, by KV head: positions, and the attention that each one has received."""

    positions: list[list[int]]
    masses: list[list[float]] = field(default_factory=list)


def oracle_logits(model: PreTrainedModel, ids: list[int], answer: list[int], asked: Compression) -> torch.Tensor:
    """Return the logits after the prompt and after each token of an answer but its last, `[num_answer, vocab_size]`."""
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        cached = {cache_keyword(model): cache}
        out = model(torch.tensor([ids]), use_cache=True, output_attentions=True, **cached)
        rows = [out.logits[0, -1]]
        layers = [_of_prompt(weights[0], cache, asked) for weights in out.attentions]
        for index, layer in enumerate(layers):
            everything = [list(range(len(ids)))] * len(layer.positions)
            _take(cache, index, everything, layer.positions)
        for number, token in enumerate(answer[:-1]):
            position = len(ids) + number
            for index, layer in enumerate(layers):
                before = layer.positions
                _drop(layer, position, asked)
                _take(cache, index, before, layer.positions)
            out = model(
                torch.tensor([[token]]),
                position_ids=torch.tensor([[position]]),
                use_cache=True,
                output_attentions=True,
                **cached,
            )
            rows.append(out.logits[0, -1])
            for layer, weights in zip(layers, out.attentions, strict=True):
                by_head = weights[0, :, -1].view(len(layer.positions), -1, weights.shape[-1]).sum(1)
                layer.positions = [[*row, position] for row in layer.positions]
                layer.masses = [
                    [mass + float(more) for mass, more in zip([*masses, 0.0], each, strict=True)]
                    for masses, each in zip(layer.masses, by_head, strict=True)
                ]
    return torch.stack(rows)


def _of_prompt(weights: torch.Tensor, cache: DynamicCache, asked: Compression) -> Layer:
    """Choose the kept entries of a prompt, given its attention weights `[num_query_heads, num_tokens, num_tokens]`."""
    num_tokens = weights.shape[-1]
    num_kv_heads = cache.layers[0].keys.shape[1]
    num_kept = min(asked.max_tokens, num_tokens)
    num_observed = asked.recent if asked.policy is CompressionPolicy.SNAPKV else min(asked.recent, _H2O_QUERIES)
    mass = weights[:, -num_observed:].sum(1).view(num_kv_heads, -1, num_tokens).sum(1)  # [num_kv_heads, num_tokens]
    if num_kept == num_tokens:
        positions = [list(range(num_tokens))] * num_kv_heads
    elif asked.policy is CompressionPolicy.STREAMING_LLM:
        window = num_kept - asked.sinks
        positions = [[*range(asked.sinks), *range(num_tokens - window, num_tokens)]] * num_kv_heads
    else:
        before = mass[:, : num_tokens - asked.recent]
        if asked.policy is CompressionPolicy.SNAPKV:
            before = avg_pool1d(before, 5, stride=1, padding=2)
        best = before.topk(num_kept - asked.recent).indices.sort().values.tolist()
        positions = [[*row, *range(num_tokens - asked.recent, num_tokens)] for row in best]
    return Layer(positions, [[float(mass[h, p]) for p in row] for h, row in enumerate(positions)])


def _drop(layer: Layer, next_position: int, asked: Compression) -> None:
    """Drop an entry of each head if there is no room for the next."""
    if asked.policy is CompressionPolicy.SNAPKV or len(layer.positions[0]) < asked.max_tokens:
        return
    rows = list(zip(layer.positions, layer.masses, strict=True))
    layer.positions, layer.masses = [], []
    for positions, masses in rows:
        free = [n for n, p in enumerate(positions) if asked.sinks <= p <= next_position - asked.recent]
        order = positions if asked.policy is CompressionPolicy.STREAMING_LLM else masses
        gone = min(free, key=order.__getitem__)
        layer.positions.append(positions[:gone] + positions[gone + 1 :])
        layer.masses.append(masses[:gone] + masses[gone + 1 :])


def _take(cache: DynamicCache, index: int, held: list[list[int]], wanted: list[list[int]]) -> None:
    """Remove all positions but the wanted ones from a layer of the cache, which holds the positions `held`."""
    layer = cache.layers[index]
    places = torch.tensor([[row.index(p) for p in want] for row, want in zip(held, wanted, strict=True)])
    layer.keys, layer.values = (
        each.gather(2, places[None, :, :, None].expand(-1, -1, -1, each.shape[-1]))
        for each in (layer.keys, layer.values)
    )
