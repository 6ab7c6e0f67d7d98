"""Measures what each format of a model's weights costs in quality.

python -m bench.perplexity --model MODEL --json bench/results/perplexity.json

The model reads held-out texts with each format (`model.weights`, `model.dtype`). The reference has the weights as the
model stores them. All formats compute in float32, except bfloat16. Measure directories: the linear layers of a GGUF
file may be quantized already. `radixkv convert` converts a GGUF file to a directory.

`int8`, with inputs of 8 bits, is refused on processors whose int8 sums may saturate. There, a directory is measured
with the same rounded weights and inputs, which are multiplied in float64.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM

from bench.parts.quality import Command, Comparison, PoolText, Row, held_out_texts, load, row_of
from radixkv.errors import ConfigError
from radixkv.kernels.cpu.int8_linear import adds_integers_exactly, quantize_rows
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.model import Model
from radixkv.model.tiny_model import build_tiny_model
from radixkv.model_files.model_location import locate

# Pairs of `model.weights` and `model.dtype`; the first pair is the reference.
FORMATS = (("auto", "float32"), ("auto", "bfloat16"), ("q8", "float32"), ("q4", "float32"), ("int8", "float32"))


class RoundedLinear(torch.nn.Module):
    """A linear layer as `model.weights = "int8"` makes it: weights and rows are rounded to integers.

    The integers are multiplied in float64, in which their sums are exact in any order.

    Args:
        linear: the layer, in float32.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        integers, scales = quantize_rows(linear.weight.detach())
        self._integers = integers.t().double()
        self._scales = scales[:, 0]
        self._bias = linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply rows `[..., in_features]`. Returns `[..., out_features]`."""
        integers, scales = quantize_rows(rows.reshape(-1, rows.shape[-1]))
        product = (integers.double() @ self._integers).float().mul_(self._scales).mul_(scales)
        if self._bias is not None:
            product.add_(self._bias)
        return product.view(*rows.shape[:-1], -1)


def round_linears(module: torch.nn.Module) -> None:
    """Replace each linear layer by a rounded one. Embeddings are unchanged, even if they share a layer's weight."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(parent, name, RoundedLinear(child))


def load_format(path: str, weights: str, dtype: str) -> Model:
    """Load a model with its weights in a format.

    Raises:
        ConfigError: see `load`; or int8 sums may saturate on this processor, and the model is a GGUF file.
    """
    if weights != "int8" or adds_integers_exactly():
        return load(path, weights=weights, dtype=dtype)
    if path == "tiny":
        module = build_tiny_model(ATTENTION_NAME)
    else:
        directory = locate(path).path
        if not directory.is_dir():
            raise ConfigError(f"model.weights: expected a directory for int8 on this processor, got {path}")
        module = AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation=ATTENTION_NAME, dtype=torch.float32, local_files_only=True
        )
    round_linears(module)
    return Model(path, module, torch.device("cpu"), is_exact=False)


def measure(path: str, num_texts: int, num_tokens: int) -> Iterator[Row]:
    """Yield a row for each format that this processor supports.

    Args:
        path: the model.
        num_texts, num_tokens: texts that it reads, and their length.
    """
    models: dict[tuple[str, str], Model] = {}
    for weights, dtype in FORMATS:
        try:
            models[weights, dtype] = load_format(path, weights, dtype)
        except ConfigError as error:
            if not models:
                raise
            print(f"{path}: {error}")
    comparisons = {weight_format: Comparison() for weight_format in models}
    for ids in held_out_texts(path, num_texts, num_tokens):
        reference = PoolText(models[FORMATS[0]], "auto", num_tokens).append(ids)
        for weight_format, model in models.items():
            is_reference = weight_format == FORMATS[0]
            logits = reference if is_reference else PoolText(model, "auto", num_tokens).append(ids)
            comparisons[weight_format].add(logits, reference, ids)
    for (weights, dtype), comparison in comparisons.items():
        yield row_of(models[FORMATS[0]], comparison.quality(), weights=weights, dtype=dtype)


COMMAND = Command(
    name="perplexity",
    description="Measure what formats of weights cost in quality.",
    header=f"{'weights':>7} {'dtype':>8}",
    columns="{weights:>7} {dtype:>8}",
    num_texts=8,
    sizes={"tokens": 512},
)

if __name__ == "__main__":
    sys.exit(COMMAND.run(lambda path, options: measure(path, options.texts, options.tokens)))
