"""Fuses parts of a model on a CPU: norms, gated MLPs, attention, the layers around them, and the decoder.

    module       children                                                 computed by
    RMS norm     none; weight and eps                                     C++, or row_norm
    gated MLP    gate_proj, up_proj (merged; or SiLU and the product      two or three matmuls
                 are part of the matmuls), act_fn, down_proj
    attention    q_proj, k_proj, v_proj (merged), o_proj, perhaps norms   two matmuls, norms, rotary embedding
    layer        input_layernorm, self_attn,                              all of the above without calling modules, or
                 post_attention_layernorm, mlp                            one C++ call, if the step allows it
    decoder      embed_tokens, rotary_emb, layers, norm                   its layers in one C++ call, if the step
                                                                          allows it; the last one by itself in a prefill

`native_layers.py` describes which steps allow one C++ call.

A call of a module or of a PyTorch function takes 1 to 5 us, and twice as long in exact mode, where functions are
intercepted. For a small model, this is most of the time of a decode step. Whether a part is replaced does not depend on
its class: each part is compared with its replacement at load.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from radixkv.kernels.cpu.row_norm import row_norm
from radixkv.kernels.cpu.row_tiles import RowFunction
from radixkv.kernels.native.rows import NativeRows
from radixkv.kernels.norm_style import GEMMA, LLAMA, TORCH
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.attention_function import kv_layer_of
from radixkv.model.attention.interface import AttentionCall
from radixkv.model.layers.fused_attention import FusedAttention, has_only_step, rotate_heads
from radixkv.model.layers.gated_mlp import GatedMLP, has_fusible_gate, is_joined, try_mlp
from radixkv.model.layers.native_layers import NativeLayerCall, layer_in_one_call, try_decoder
from radixkv.model.layers.packed_linear import PackedLinear, PackedSlice
from radixkv.model.layers.quantized_embedding import QuantizedEmbedding
from radixkv.model.layers.replaced_parts import (
    LAYER_PARTS,
    MLP_PARTS,
    Forward,
    Refused,
    ReplacedParts,
    agree,
    eps_of,
    hooks_of,
    is_norm,
    require,
    with_replaced_children,
)

_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = ("q_norm", "k_norm")  # in the order of `FusedAttention.norms`
_DECODER_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}


class FusedCpuLayers(ReplacedParts):
    """Replaces known parts of a model whose linear layers are packed.

    Args:
        module: the model, on a CPU and in evaluation mode.
        is_exact: whether results must be batch-invariant.
        library: the C++ kernels; None to compute the operations between matmuls with PyTorch.

    Attributes:
        is_invariant_for_one_row: whether a row has the same result alone and among other rows, so that a single row
            need not be padded. This holds if all layers and norms are known, all norms are in C++, the other parts
            combine no rows, and no matmul is limited to certain row counts.
    """

    def __init__(self, module: nn.Module, *, is_exact: bool, library: ctypes.CDLL | None = None) -> None:
        self._library = library
        self._native = None if library is None else NativeRows(library)
        self._dtype = next(module.parameters()).dtype
        self._is_exact = is_exact
        # The replacements of parts that were tried. `ReplacedParts` tries a part after the parts inside it.
        self._norms: dict[nn.Module, RowFunction] = {}
        self._mlps: dict[nn.Module, GatedMLP] = {}
        self._attentions: dict[nn.Module, FusedAttention] = {}
        self._layers: set[nn.Module] = set()
        self._native_calls: dict[nn.Module, NativeLayerCall] = {}  # of layers whose parts are all in C++
        self._uses_torch_norms = library is None
        self._tried_gates: set[tuple[int, int]] = set()  # (in_features, out_features) of the gates that were compared
        super().__init__(module, self._try_part)
        self.is_invariant_for_one_row = (
            not self._uses_torch_norms
            and all(part in self._norms or _keeps_rows_separate(part) for part in _parts_outside(module, self._layers))
            and not any(_row_counts(part) for part in module.modules())
        )

    def _try_part(self, part: Any) -> Forward | None:
        """Return the replacement of a part's forward pass; see `known_forward` in `ReplacedParts`."""
        children = dict(part.named_children())
        if is_norm(part, self._dtype):
            self._norms[part] = self._try_norm(part)
            return partial(_rows_forward, hooks=(), replacement=self._norms[part])
        if children.keys() == MLP_PARTS and (
            is_joined(part.gate_proj, part.up_proj, last=part.down_proj) or has_fusible_gate(part)
        ):
            self._mlps[part] = self._try_mlp(part)
            return partial(_rows_forward, hooks=hooks_of(children.values()), replacement=self._mlps[part])
        if children.keys() - _HEAD_NORMS == _ATTENTION_PARTS and is_joined(
            part.q_proj, part.k_proj, part.v_proj, last=part.o_proj
        ):
            self._attentions[part] = self._try_attention(part)
            return partial(_attention_forward, hooks=hooks_of(children.values()), attention=self._attentions[part])
        if children.keys() == LAYER_PARTS and self._has_known_parts(children):
            forward = self._try_layer(part)
            self._layers.add(part)
            return forward
        if children.keys() == _DECODER_PARTS and self._native_calls.keys() >= {*part.layers}:
            return try_decoder(part, [self._native_calls[layer] for layer in part.layers])
        return None

    def _try_norm(self, norm: Any) -> RowFunction:
        eps = torch.tensor([eps_of(norm)])
        for style in (LLAMA, GEMMA, TORCH):
            weight = norm.weight if style.rounds_first else norm.weight.float() + style.weight_offset
            if self._native is not None:
                native = self._native.norm(weight, eps_of(norm), style)
                if agree(norm.forward, native, norm.weight):
                    return native
            normed = partial(row_norm, weight=weight, eps=eps, style=style)
            if agree(norm.forward, normed, norm.weight):
                self._uses_torch_norms = True
                return normed
        raise Refused("it computes something else")

    def _try_mlp(self, mlp: Any) -> GatedMLP:
        native_gate = None if self._native is None else self._native.gate
        return try_mlp(
            mlp, self._dtype, is_exact=self._is_exact, tried_gates=self._tried_gates, native_gate=native_gate
        )

    def _try_attention(self, module: Any) -> FusedAttention:
        original_step, fused_step = _RecordingStep(), _RecordingStep()
        simplified = with_replaced_children(module, {"o_proj": lambda rows: rows})
        head_dim = module.head_dim
        norms = tuple(self._norms[getattr(module, name)] for name in _HEAD_NORMS if hasattr(module, name))
        if len(norms) == 1:
            raise Refused("it normalizes only one of queries and keys")
        layer_idx = kv_layer_of(module)
        embeddings_by_length: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # cosines and sines

        def arguments_for(rows: torch.Tensor) -> dict[str, Any]:
            angles = torch.randn(1, rows.shape[1], head_dim, generator=torch.Generator().manual_seed(rows.shape[1]))
            embeddings = embeddings_by_length.setdefault(rows.shape[1], (angles.cos().to(rows), angles.sin().to(rows)))
            return {"position_embeddings": embeddings, "attention_mask": None}

        def original(rows: torch.Tensor) -> torch.Tensor:
            output, _ = simplified.forward(rows, **arguments_for(rows), radix_step=original_step)
            return torch.cat((output, *original_step.recorded), -1)

        def fused(rows: torch.Tensor) -> torch.Tensor:
            attention = make_attention(lambda rows: rows)
            output = attention(rows, arguments_for(rows)["position_embeddings"], fused_step)
            return torch.cat((output, *fused_step.recorded), -1)

        def make_attention(project_output: RowFunction) -> FusedAttention:
            assert original_step.scoring is not None, "the module has run first"
            queries: PackedSlice = module.q_proj
            return FusedAttention(
                layer=layer_idx,
                qkv=queries.joined.matmul,
                num_query_heads=queries.end // head_dim,
                num_kv_heads=module.k_proj.out_features // head_dim,
                head_dim=head_dim,
                norms=norms,
                rotate=rotate_heads if self._native is None else self._native.rotate,
                project_output=project_output,
                scoring=original_step.scoring,
            )

        like = torch.empty(module.q_proj.in_features, dtype=self._dtype)
        require(agree(original, fused, like))
        require(original_step.scoring == fused_step.scoring and original_step.layers == {layer_idx})
        return make_attention(module.o_proj.matmul)

    def _has_known_parts(self, children: dict[str, nn.Module]) -> bool:
        return (
            children["input_layernorm"] in self._norms
            and children["post_attention_layernorm"] in self._norms
            and children["mlp"] in self._mlps
            and children["self_attn"] in self._attentions
        )

    def _try_layer(self, layer: Any) -> Forward:
        attention_norm, mlp_norm = self._norms[layer.input_layernorm], self._norms[layer.post_attention_layernorm]

        # In the trial, attention and MLP are functions that only permute and scale numbers, so that only the norms and
        # the residual sums are compared.
        def attend(hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            return hidden_states.roll(1, -1) / 2, None

        simplified = with_replaced_children(layer, {"self_attn": attend, "mlp": lambda rows: rows.flip(-1) / 4})

        def fused(rows: torch.Tensor) -> torch.Tensor:
            return _residual_layer(
                rows, attention_norm, lambda rows: attend(rows)[0], mlp_norm, lambda rows: rows.flip(-1) / 4
            )

        original = partial(simplified.forward, position_embeddings=None, attention_mask=None)
        require(agree(original, fused, layer.post_attention_layernorm.weight))
        attention, mlp = self._attentions[layer.self_attn], self._mlps[layer.mlp]
        native_call = None
        if self._library is not None and self._native is not None:
            native_call = layer_in_one_call(self._library, self._native, (attention_norm, mlp_norm), attention, mlp)
            if native_call is not None:
                self._native_calls[layer] = native_call
        hooks = hooks_of(part for part in layer.modules() if part is not layer)
        return partial(
            _layer_forward,
            hooks=hooks,
            attention_norm=attention_norm,
            attention=attention,
            mlp_norm=mlp_norm,
            mlp=mlp,
            native_call=native_call,
        )


class _RecordingStep:
    """A step for trials: it records the attention call and returns a permutation of the queries."""

    def __init__(self) -> None:
        self.recorded: list[torch.Tensor] = []
        self.scoring: Scoring | None = None
        self.layers: set[int] = set()

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer, query, key, value, scoring = call
        assert value is not None, "an attention layer with a value projection has values"
        self.recorded = [each.flatten(1)[None] for each in (query, key, value)]
        self.scoring = scoring
        self.layers.add(layer)
        return query.flip(-1)


def _parts_outside(part: nn.Module, layers: Set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the parts of a model, including the model itself, that are not inside these layers."""
    if part not in layers:
        yield part
        for child in part.children():
            yield from _parts_outside(child, layers)


def _keeps_rows_separate(part: nn.Module) -> bool:
    """Whether the class of a part does nothing but select rows, apply functions to single rows, and call children."""
    is_known = isinstance(part, PreTrainedModel | nn.ModuleList | nn.Embedding | QuantizedEmbedding | PackedLinear)
    return is_known or type(part).__name__.endswith("RotaryEmbedding")


def _row_counts(part: nn.Module) -> tuple[int, ...]:
    """Return the numbers of rows that calls of a part's matmul may have; empty for any number, or without a matmul."""
    if isinstance(part, PackedSlice):
        return part.joined.matmul.row_counts
    return part.matmul.row_counts if isinstance(part, PackedLinear) else ()


def _rows_forward(
    part: nn.Module, rows: torch.Tensor, *, hooks: Sequence[Mapping[int, object]], replacement: RowFunction
) -> Any:
    if any(hooks):
        return type(part).forward(part, rows)
    with torch._C.DisableTorchFunction():  # the replacement is exact by itself
        return replacement(rows)


def _attention_forward(
    part: Any,
    hidden_states: torch.Tensor,
    *args: Any,
    hooks: Sequence[Mapping[int, object]],
    attention: FusedAttention,
    **kwargs: Any,
) -> Any:
    with torch._C.DisableTorchFunction():
        if not (args or any(hooks)) and _is_called_as_in_trial(hidden_states, kwargs, attention):
            return attention(hidden_states, kwargs["position_embeddings"], kwargs["radix_step"]), None
    return type(part).forward(part, hidden_states, *args, **kwargs)


def _layer_forward(
    layer: Any,
    hidden_states: torch.Tensor,
    *args: Any,
    hooks: Sequence[Mapping[int, object]],
    attention_norm: RowFunction,
    attention: FusedAttention,
    mlp_norm: RowFunction,
    mlp: RowFunction,
    native_call: NativeLayerCall | None,
    **kwargs: Any,
) -> Any:
    with torch._C.DisableTorchFunction():
        if not (args or any(hooks)) and _is_called_as_in_trial(hidden_states, kwargs, attention):
            embeddings, step = kwargs["position_embeddings"], kwargs["radix_step"]
            output = None if native_call is None else native_call(hidden_states, embeddings, step)
            if output is not None:
                return output
            return _residual_layer(
                hidden_states, attention_norm, lambda rows: attention(rows, embeddings, step), mlp_norm, mlp
            )
    return type(layer).forward(layer, hidden_states, *args, **kwargs)


def _residual_layer(
    rows: torch.Tensor, attention_norm: RowFunction, attend: RowFunction, mlp_norm: RowFunction, mlp: RowFunction
) -> torch.Tensor:
    rows = rows + attend(attention_norm(rows))
    return rows + mlp(mlp_norm(rows))


def _is_called_as_in_trial(rows: torch.Tensor, kwargs: dict[str, Any], attention: FusedAttention) -> bool:
    """Whether a layer is called as in its trial: with a step, a rotary embedding that it accepts, and no mask."""
    rotations = kwargs.get("position_embeddings")
    return rotations is not None and attention.accepts(rows, rotations) and has_only_step(kwargs)
