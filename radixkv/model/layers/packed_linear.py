"""Replaces the linear layers of a model: prepacked weights on a CPU, and merged layers that read the same rows."""

from __future__ import annotations

import inspect
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.pytorch_utils import Conv1D

from radixkv.kernels.cpu.gemm_backends import GEMM_BACKENDS, aligned_rows
from radixkv.kernels.cpu.gemm_trial import GemmChoice
from radixkv.kernels.cpu.row_tiles import SIZES, in_tiles, tiles_of
from radixkv.kernels.native.gemm import Panels, QuantizedPanels
from radixkv.kernels.native.layer import Weights
from radixkv.kernels.quantized_weight import QuantizedWeight
from radixkv.model.layers.gemm_tuner import GemmTuner
from radixkv.model.layers.quantized_embedding import QuantizedEmbedding
from radixkv.model.layers.replaced_parts import has_hooks
from radixkv.model.layers.stored_weight import dequantize_stored_weight, forget_stored_weight, stored_weight

_log = logging.getLogger(__name__)

# Maximum number of rows per call of the LM head: a step needs few logits.
_LOGIT_ROWS = 64

# Names of children of a part that read the same rows, so that they can be merged.
GATED = ("gate_proj", "up_proj")
MERGED = (("q_proj", "k_proj", "v_proj"), GATED)

# Activations that a library computes together with the matmul.
SILU = (nn.SiLU, SiLUActivation)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Matmul:
    """A matmul of rows with packed weights, plus a bias, on a CPU.

    Args:
        weights: `[out_features, in_features]` each, quantized ones for a backend that takes them; their outputs are
            concatenated in order. The originals are not kept, unless the backend uses them as they are.
        bias: bias of all output features, or None.
        choice: the GEMM backend, and the row counts of its calls.

    Attributes:
        dtype: dtype of the rows and of the output.
        addition: called with the rows and the output, to which it may add in place, as LoRA adapters do; None if
            nothing is added.
    """

    def __init__(
        self, weights: Sequence[torch.Tensor | QuantizedWeight], bias: torch.Tensor | None, choice: GemmChoice
    ) -> None:
        backend = GEMM_BACKENDS[choice.backend]
        self.out_features = sum(map(len, weights))
        self.in_features = weights[0].shape[1]
        self.dtype = weights[0].dtype
        self._packed = backend.pack(*weights)
        self._bias = bias
        self._multiply = backend.multiply
        self._gate = backend.gate
        self._tiles = tiles_of(choice.costs) if choice.costs else None
        self.addition: Callable[[torch.Tensor, torch.Tensor], None] | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a new tensor `[..., out_features]` for rows `[..., in_features]`."""
        if not rows.numel():  # a step without logits
            return rows.new_empty(*rows.shape[:-1], self.out_features)
        with torch._C.DisableTorchFunction():  # in exact mode, the matmul is exact by itself
            output = self._in_calls(self._multiply, rows, self._packed, self._bias)
            if self.addition is not None:
                self.addition(rows, output)
        return output

    @property
    def native_weights(self) -> Weights | None:
        """The weights, packed for the C++ kernels; None for other backends, or with an `addition` or `row_counts`."""
        is_native = isinstance(self._packed, Panels) and self._tiles is None and self.addition is None
        return Weights(self._packed, self._bias) if is_native else None

    @property
    def quantized_panels(self) -> QuantizedPanels | None:
        """The weight, quantized and packed for the C++ kernels; None for other backends."""
        return self._packed if isinstance(self._packed, QuantizedPanels) else None

    @property
    def can_gate(self) -> bool:
        """Whether its library fuses the multiplication by a gate into the matmul, and there is no `addition`."""
        return self._gate is not None and self.addition is None

    @property
    def costs(self) -> Mapping[int, float]:
        """Seconds per call, by its number of rows; empty if calls may have any number of rows."""
        return {} if self._tiles is None else self._tiles.costs

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Numbers of rows that calls may have; empty for any number."""
        return tuple(self.costs)

    def multiply_in_one_call(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute rows from `aligned_rows` in one call. Their number must be one of `row_counts`, if there are any."""
        return self._multiply(rows, self._packed, self._bias)

    def gate(self, rows: torch.Tensor, up: Matmul) -> torch.Tensor:
        """Return SiLU of the output for rows `[..., in_features]`, times the output of `up` for these rows.

        Args:
            rows: at least one.
            up: a matmul of the same choice and shape; both `can_gate`.
        """
        assert self._gate is not None, "its backend gates"
        return self._in_calls(self._gate, rows, self._packed, self._bias, up._packed, up._bias)

    def _in_calls(self, function: Callable[..., torch.Tensor], rows: torch.Tensor, *weights: Any) -> torch.Tensor:
        """Apply a function of `aligned_rows` and weights to all rows, in calls of the allowed numbers of rows."""
        aligned = aligned_rows(rows)
        if self._tiles is None:
            output = function(aligned, *weights)
        else:
            output = in_tiles(lambda piece: function(aligned_rows(piece), *weights), aligned, self._tiles)
        return output.view(*rows.shape[:-1], self.out_features)


class _Parameters(NamedTuple):
    """Parameters of a linear layer. `stored` is the weight as quantized in a file; None if it was not quantized."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    stored: QuantizedWeight | None

    @property
    def stored_format(self) -> str | None:
        return None if self.stored is None else f"q{self.stored.bits}"

    def in_8_bits(self) -> _Parameters:
        """Return the same parameters with a stored weight of 8 bits; unchanged if there is no stored weight."""
        if self.stored is None or self.stored.bits == 8:
            return self
        return self._replace(stored=QuantizedWeight.quantize(self.stored.dequantize(), 8, self.stored.dtype))


class PackedLinear(nn.Module):
    """A linear layer without parameters: its matmul holds the packed weight.

    Args:
        matmul: computes the output.
    """

    def __init__(self, matmul: Matmul) -> None:
        super().__init__()
        self.in_features = matmul.in_features
        self.out_features = matmul.out_features
        self.dtype = matmul.dtype
        self.matmul = matmul

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the output `[..., out_features]` for rows `[..., in_features]`."""
        return self.matmul(rows)


class PlainMatmul:
    """The matmul of rows with an unpacked weight, by PyTorch, or in exact mode by its replacement. For GPUs.

    Args:
        weight: `[out_features, in_features]`.
        bias: `[out_features]`, or None.
    """

    row_counts: tuple[int, ...] = ()  # a call may have any number of rows

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the output `[..., out_features]` for rows `[..., in_features]`."""
        return functional.linear(rows, self._weight, self._bias)


class MergedMatmul:
    """One matmul for several linear layers that read the same rows. The layers take their slices one after the other.

    Args:
        matmul: the matmul with the weights of all layers, in order.
    """

    def __init__(self, matmul: Matmul | PlainMatmul) -> None:
        self.matmul = matmul
        # The rows of the last call whose output is kept, and this output.
        self._rows: torch.Tensor | None = None
        self._output: torch.Tensor | None = None

    def features(self, rows: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Return the output features `[start, end)` for rows `[..., in_features]`.

        The whole output is computed for the first slice and kept until the last one is taken.
        """
        if self._rows is not rows or self._output is None:
            self._rows = rows
            self._output = self.matmul(rows)
        features = self._output[..., start:end]
        if end == self.matmul.out_features:
            self._rows = self._output = None
        return features


class PackedSlice(nn.Module):
    """A linear layer whose weight was merged with others.

    Args:
        joined: the merged matmul.
        start, end: the layer's features in its output.
    """

    def __init__(self, joined: MergedMatmul, start: int, end: int) -> None:
        super().__init__()
        self.in_features = joined.matmul.in_features
        self.out_features = end - start
        self.dtype = joined.matmul.dtype
        self.joined = joined
        self.start = start
        self.end = end

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the output `[..., out_features]` for rows `[..., in_features]`."""
        return self.joined.features(rows, self.start, self.end)


def pack_linears(module: PreTrainedModel, tuner: GemmTuner, *, may_gate: bool = True) -> None:
    """Replace the linear layers of a model on a CPU, and embeddings with a stored weight. Logs how they are computed.

    Layers that read the same rows are merged: query, key and value projections, and gate and up projections, unless the
    library fuses the gate into the matmul. A weight is freed after it was packed, unless it is also an embedding. A
    layer for which no backend is batch-invariant is not replaced; a stored weight of such a layer is dequantized.

    Args:
        module: the model, in evaluation mode. Its linear layers must not have been replaced yet.
        tuner: chooses the GEMM backends.
        may_gate: whether a library may fuse the gate into the matmul. If so, adapters cannot add to either output.
    """
    head = module.get_output_embeddings()
    packed: dict[nn.Module, nn.Module] = {}  # the replacements, by layer
    counts: Counter[str] = Counter()  # layers by backend
    num_uses = Counter(id(child) for part in module.modules() for child in part.children())
    shares = _Shares(module)
    for part in list(module.modules()):
        children = _replaceable_children(part)
        for names, layers in _mergeable_layers(children, num_uses):
            if (
                may_gate
                and names == GATED
                and type(children.get("act_fn")) in SILU
                and _can_gate(layers, tuner, shares.of(part, layers))
            ):
                continue
            make_matmul = partial(_choose_matmul, tuner=tuner, counts=counts, share=shares.of(part, layers))
            packed.update(zip(layers, _merge(layers, make_matmul), strict=False))  # no slices if they can't be merged
        for name, child in children.items():
            if child not in packed:
                parameters = _parameters(child)
                if parameters is None:
                    continue
                share = shares.of(part, [child])
                matmul = _choose_matmul([parameters], tuner, counts, share, is_head=child is head)
                if matmul is None:
                    continue
                packed[child] = PackedLinear(matmul)
            setattr(part, name, packed[child])
    _replace_embeddings(module, packed)
    for part in module.modules():
        dequantize_stored_weight(part)
    if counts:
        _log.info("matmuls by library: %s", ", ".join(f"{name} {count}" for name, count in counts.most_common()))


def _replace_embeddings(module: PreTrainedModel, packed: Mapping[nn.Module, nn.Module]) -> None:
    """Replace the embeddings with a stored weight. If the head has the same stored weight, it is packed only once.

    Args:
        module: the model.
        packed: the replaced linear layers, with their replacements.
    """
    panels = {
        id(stored): replacement.matmul.quantized_panels
        for layer, replacement in packed.items()
        if isinstance(replacement, PackedLinear) and (stored := stored_weight(layer)) is not None
    }
    for part in list(module.modules()):
        for name, child in _replaceable_children(part).items():
            stored = stored_weight(child)
            if isinstance(child, nn.Embedding) and stored is not None:
                shared = panels.get(id(stored)) or QuantizedPanels([stored], stored.dtype)
                setattr(part, name, QuantizedEmbedding(child, shared))
                forget_stored_weight(child)


def merge_linears(module: PreTrainedModel) -> None:
    """Merge the linear layers of a model on a GPU that read the same rows, so that one matmul computes them all.

    Query, key and value projections are merged, and so are gate and up projections. Each weight is freed after it was
    merged. Adapters cannot be applied to the model afterwards.

    Args:
        module: the model on its device, in evaluation mode.
    """

    def make_matmul(parameters: Sequence[_Parameters]) -> PlainMatmul:
        biases = [each.bias for each in parameters if each.bias is not None]
        return PlainMatmul(torch.cat([each.weight for each in parameters]), torch.cat(biases) if biases else None)

    num_uses = Counter(id(child) for part in module.modules() for child in part.children())
    for part in list(module.modules()):
        for names, layers in _mergeable_layers(_replaceable_children(part), num_uses):
            for name, replacement in zip(names, _merge(layers, make_matmul), strict=False):
                setattr(part, name, replacement)


def _replaceable_children(part: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a part, except those whose weight the part itself reads."""
    names_read = _weights_read_by(part.__class__.forward)
    return {name: child for name, child in part.named_children() if name not in names_read}


def _mergeable_layers(
    children: Mapping[str, nn.Module], num_uses: Mapping[int, int]
) -> Iterator[tuple[tuple[str, ...], list[nn.Module]]]:
    """Yield names and layers of the children that read the same rows, unless another part also uses one of them."""
    for names in MERGED:
        layers = [children[name] for name in names if name in children]
        if len(layers) == len(names) and all(num_uses[id(layer)] == 1 for layer in layers):
            yield names, layers


class _Shares:
    """The shares of a model's weights that layers of the same shape have.

    Args:
        module: the model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._num_alike = Counter(type(part) for part in module.modules())
        layers = {layer for part in module.modules() for layer in part.children()}
        self._num_weights = sum(_num_weights(layer) for layer in layers)

    def of(self, part: nn.Module, layers: Sequence[nn.Module]) -> float:
        """Return the share, 0 to 1, of some layers of a part, and of the same layers in all parts of its class."""
        num_weights = self._num_alike[type(part)] * sum(map(_num_weights, layers))
        return min(1.0, num_weights / max(1, self._num_weights))


def _num_weights(layer: nn.Module) -> int:
    parameters = _parameters(layer)
    return 0 if parameters is None else parameters.weight.numel()


@cache
def _weights_read_by(forward: Callable[..., object]) -> frozenset[str]:
    """Return the names of children whose weight a module's forward pass reads directly, for example for its dtype."""
    try:
        return frozenset(re.findall(r"self\.(\w+)\.weight\b", inspect.getsource(forward)))
    except (OSError, TypeError):  # the source is not available
        return frozenset()


def _can_gate(layers: list[nn.Module], tuner: GemmTuner, share: float) -> bool:
    """Whether gate and up projections should not be merged, because the library fuses the gate into the matmul.

    In bfloat16, the operations between the matmuls take a fifth of the time of the MLP for 512 rows of a 0.2B model. In
    float32 they take 2 %, which is less than merging gains.
    """
    parameters = [_parameters(layer) for layer in layers]
    if any(each is None or each.weight.dtype != torch.bfloat16 for each in parameters):
        return False
    chosen = [
        tuner.choose(each.weight, each.bias, share=share, stored=each.stored_format)
        for each in parameters
        if each is not None
    ]
    return chosen[0] is not None and chosen[0] == chosen[1] and GEMM_BACKENDS[chosen[0].backend].gate is not None


def _merge(
    layers: list[nn.Module],
    make_matmul: Callable[[Sequence[_Parameters]], Matmul | PlainMatmul | None],
) -> list[PackedSlice]:
    """Merge linear layers that read the same rows. Returns their replacements; an empty list if they can't be merged.

    If some of their weights are stored in 8 bits and others in 4, all are merged in 8 bits.

    Args:
        layers: at least two.
        make_matmul: creates one matmul of their weights and biases, or returns None if it cannot.
    """
    parameters = [_parameters(layer) for layer in layers]
    known = [each for each in parameters if each is not None]
    if len({each.stored_format for each in known}) > 1:
        known = [each.in_8_bits() for each in known]
    # Weights and biases can be concatenated if they are alike in all of these.
    kinds = {(each.weight.shape[1], each.weight.dtype, each.bias is None, each.stored_format) for each in known}
    if len(known) < len(layers) or len(kinds) > 1:
        return []
    matmul = make_matmul(known)
    if matmul is None:
        return []
    joined = MergedMatmul(matmul)
    ends = list(itertools.accumulate(len(each.weight) for each in known))
    return [PackedSlice(joined, start, end) for start, end in itertools.pairwise([0, *ends])]


def _parameters(layer: nn.Module) -> _Parameters | None:
    """Return weight and bias of a layer that can be packed; None for a layer that must not be replaced."""
    if type(layer) not in (nn.Linear, Conv1D) or has_hooks(layer) or "forward" in vars(layer):
        return None
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    weight, bias = parameters["weight"], parameters.get("bias")
    if type(layer) is Conv1D:
        weight = weight.t()
    if weight.dtype not in _DTYPES or (bias is not None and bias.dtype != weight.dtype) or not weight.numel():
        return None
    return _Parameters(weight, bias, stored_weight(layer))


def _choose_matmul(
    parameters: Sequence[_Parameters],
    tuner: GemmTuner,
    counts: Counter[str],
    share: float,
    *,
    is_head: bool = False,
) -> Matmul | None:
    """Pack weights and biases of one dtype as one, and count the backend. Returns None if they cannot be packed."""
    weights = [each.weight for each in parameters]
    biases = [each.bias for each in parameters if each.bias is not None]
    # The choice for concatenated weights depends only on their shape, so they need not be concatenated for it.
    weight = weights[0]
    if len(weights) > 1:
        weight = weight.new_empty(sum(map(len, weights)), weight.shape[1])
    bias = torch.cat(biases) if len(biases) > 1 else next(iter(biases), None)
    max_rows = _LOGIT_ROWS if is_head else SIZES[-1]
    choice = tuner.choose(
        weight, bias, max_rows=max_rows, share=share, is_head=is_head, stored=parameters[0].stored_format
    )
    if choice is None:
        return None
    counts[choice.backend] += 1
    matmul_weights: list[torch.Tensor | QuantizedWeight] = [*weights]
    if choice.backend == parameters[0].stored_format:
        matmul_weights = [each.weight if each.stored is None else each.stored for each in parameters]
    return Matmul(matmul_weights, bias, choice)
