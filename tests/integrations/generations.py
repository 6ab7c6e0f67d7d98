"""Small models of transformers with random weights, and greedy generations to compare."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PretrainedConfig

from radixkv.integrations.transformers import PromptCache, RadixCache
from radixkv.integrations.transformers.model_requirements import cache_name
from tests.model.exact.checkpoints import CONFIGS, SHAPE, VOCAB_SIZE

KINDS: dict[str, PretrainedConfig] = {
    **copy.deepcopy(CONFIGS),  # other tests change the attention of these configurations
    "gemma3": Gemma3TextConfig(
        **SHAPE,
        head_dim=32,
        sliding_window=24,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
}
GREEDY = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
# GEMMs with another number of rows sum in another order, so logits may differ by this share of the largest logit.
MAX_DIFFERENCE = 1e-5


def model_of(config: PretrainedConfig, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def prompt(seed: int, *lengths: int) -> torch.Tensor:
    """Return a prompt `[1, num_tokens]` without padding, made of parts with these lengths.

    Parts of two prompts are equal if their seeds, their indices and their lengths are.
    """
    parts = [
        torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(hash((seed, index, length))))
        for index, length in enumerate(lengths)
    ]
    return torch.cat(parts)[None]


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the arguments of `generate` for prompts `[1, num_tokens]` as one batch, with padding on the left."""
    length = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (length - row.shape[1], 0)) for row in rows])
    lengths = torch.tensor([row.shape[1] for row in rows])[:, None]
    return {"input_ids": ids, "attention_mask": (torch.arange(length)[None] >= length - lengths).long()}


def same(ours: Any, theirs: Any, max_difference: float = MAX_DIFFERENCE) -> bool:
    """Return whether two greedy generations have equal tokens, and logits that differ by rounding only."""
    logits, expected = torch.stack(ours.logits), torch.stack(theirs.logits)
    return torch.equal(ours.sequences, theirs.sequences) and close(logits, expected, max_difference)


def close(ours: torch.Tensor, theirs: torch.Tensor, max_difference: float = MAX_DIFFERENCE) -> bool:
    return bool((ours - theirs).abs().max() <= max_difference * theirs.abs().max())


def forward(model: Any, cache: PromptCache, *arguments: Any, **options: Any) -> Any:
    """Run one forward pass of a model over a cache."""
    return model(*arguments, **{cache_name(model): cache}, **options)


@contextmanager
def record_forward_sizes(model: Any) -> Iterator[list[int]]:
    """Record the number of tokens of each forward pass within the block."""
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    yield sizes
    hook.remove()


def generate_in_threads(radix: RadixCache, model: Any) -> list[int]:
    """Let three threads make nine generations each from six prompts. Returns the indices of wrongly answered ones."""
    prompts = [torch.cat([prompt(1, 30), prompt(seed, 10)], dim=1) for seed in range(2, 8)]
    expected = [model.generate(ids, **GREEDY) for ids in prompts]
    wrong: list[int] = []

    def generate(first_index: int) -> None:
        for number in range(9):
            index = (first_index + number) % len(prompts)
            if not same(radix.generate(prompts[index], **GREEDY), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=generate, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return wrong
