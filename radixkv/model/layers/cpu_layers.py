"""Fuses parts of a model on a CPU: norms, gated MLPs, attention, the layers around them, and the decoder.

    module       children                                                 computed by
    RMS norm     none; weight and eps                                     C++, or row_norm
    gated MLP    gate_proj, up_proj (merged, or one gates the other       two or three matmuls
                 within the matmul), act_fn, down_proj
    attention    q_proj, k_proj, v_proj (merged), o_proj, perhaps norms   two matmuls, one rotary embedding
    layer        input_layernorm, self_attn,                              all of the above without calling modules, or
                 post_attention_layernorm, mlp                            one C++ call, if the step allows it
    decoder      embed_tokens, rotary_emb, layers, norm                   its layers in one C++ call, if the step
                                                                          allows it; the last one by itself in a prefill

A call of a module or of a PyTorch function takes 1 to 5 us, and twice as long in exact mode, where functions are
intercepted. For a small model, this is most of the time of a decode step. Whether a part is replaced does not depend on
its class: each part is compared with its replacement at load.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from radixkv.kernels.cpu.row_norm import row_norm
from radixkv.kernels.cpu.row_tiles import RowFunction
from radixkv.kernels.native.layer import LayerParts, NativeLayers, Weights
from radixkv.kernels.native.rows import NativeNorm, NativeRows
from radixkv.kernels.norm_style import GEMMA, LLAMA, TORCH
from radixkv.kernels.scoring import Scoring
from radixkv.model.attention.attention_function import kv_layer_of
from radixkv.model.attention.interface import AttentionCall, AttentionStep
from radixkv.model.layers.gated_mlp import MLP_PARTS, GatedMLP, is_gated, is_joined, try_mlp
from radixkv.model.layers.packed_linear import Matmul, PackedLinear, PackedSlice
from radixkv.model.layers.quantized_embedding import QuantizedEmbedding
from radixkv.model.layers.replaced_parts import (
    Forward,
    Refused,
    ReplacedParts,
    agree,
    eps_of,
    is_norm,
    require,
    with_replaced_children,
)
from radixkv.model.refusals import reason_of


class NativeLayerCall:
    """Consecutive decoder layers whose parts are all in C++.

    Args:
        library: from `load_library`.
        parts: the norms and matmuls of each layer.
        attentions: the attention of each layer, alike in heads and scoring.
    """

    def __init__(self, library: ctypes.CDLL, parts: Sequence[LayerParts], attentions: Sequence[FusedAttention]) -> None:
        self._library = library
        self._parts = parts
        self._attentions = attentions
        self._layers = NativeLayers(library, parts)
        self._indices = [attention.layer for attention in attentions]

    @classmethod
    def joined(cls, calls: Sequence[NativeLayerCall]) -> NativeLayerCall | None:
        """Return one call of the layers of all these calls; None if their attention differs or has sinks."""
        attentions = [attention for call in calls for attention in call._attentions]
        shapes = {(each.num_query_heads, each.num_kv_heads, each.head_dim) for each in attentions}
        scoring = attentions[0].scoring
        if len(shapes) > 1 or any(each.scoring != scoring or each.scoring.sinks is not None for each in attentions):
            return None
        return cls(calls[0]._library, [parts for call in calls for parts in call._parts], attentions)

    def takes(self, rows: torch.Tensor, position_embeddings: Iterable[torch.Tensor]) -> bool:
        """See `FusedAttention.takes`."""
        return self._attentions[0].takes(rows, position_embeddings)

    def __call__(
        self, rows: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], step: AttentionStep
    ) -> torch.Tensor | None:
        """Compute the layers for rows `[1, num_tokens, hidden_size]`, with cosines and sines for which `takes` is true.

        Returns:
            A new tensor of the same shape; None, with nothing computed, if the step has no view of the layers' K/V, or
            the rows are not contiguous.
        """
        view = getattr(step, "view", None)
        if view is None or not rows.is_contiguous():
            return None
        own = self._attentions[0]
        found = view(self._indices, self._layers.queries(rows.shape[1]), own.num_kv_heads, own.scoring)
        return None if found is None else self._layers(rows, *position_embeddings, found)


class _NotInOneCall(Exception):
    """A part of a layer is not in C++, or not in a form that layer.cpp supports."""


def layer_in_one_call(
    library: ctypes.CDLL,
    rows: NativeRows,
    norms: tuple[RowFunction, RowFunction],
    attention: FusedAttention,
    mlp: GatedMLP,
) -> NativeLayerCall | None:
    """Return a layer that is computed by one call; None if a part is not in C++, or a norm covers several heads.

    Args:
        library: from `load_library`.
        rows: the C++ functions of rows.
        norms: the norms before the attention and before the MLP.
        attention, mlp: the other parts.
    """
    if mlp.up is None and mlp.gate_rows != rows.gate:
        return None
    try:
        first, second = map(_norm, norms)
        heads_norms = [_head_norm(norm, attention.head_dim) for norm in attention.norms]
        query, key = heads_norms or (None, None)
        parts = LayerParts(
            *(first, second, _weights(attention.qkv), query, key, _weights(attention.down)),
            *(_weights(mlp.gate), None if mlp.up is None else _weights(mlp.up), _weights(mlp.down)),
            *(attention.num_query_heads, attention.num_kv_heads, attention.head_dim),
        )
    except _NotInOneCall:
        return None
    return NativeLayerCall(library, [parts], [attention])


def _norm(norm: RowFunction) -> NativeNorm:
    if not isinstance(norm, NativeNorm):
        raise _NotInOneCall
    return norm


def _head_norm(norm: RowFunction, head_dim: int) -> NativeNorm:
    native = _norm(norm)
    if len(native.weight) != head_dim:  # OLMo 2 normalizes all heads of a token as one row
        raise _NotInOneCall
    return native


def _weights(matmul: RowFunction) -> Weights:
    weights = matmul.native_weights if isinstance(matmul, Matmul) else None
    if weights is None:
        raise _NotInOneCall
    return weights


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """The attention of one layer, with its projections.

    Attributes:
        layer: its index.
        qkv: computes queries, keys and values.
        num_query_heads, num_kv_heads, head_dim: the shape.
        norms: the norms of queries and of keys; empty if there are none.
        rotate: rotates heads `[num_tokens, num_heads, head_dim]`, given cosines and sines `[num_tokens, head_dim]`,
            contiguous and in the same dtype.
        down: the output projection.
        scoring: see `AttentionStep`.
    """

    layer: int
    qkv: RowFunction
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    norms: tuple[RowFunction, ...]
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    down: RowFunction
    scoring: Scoring

    def takes(self, rows: torch.Tensor, position_embeddings: Iterable[torch.Tensor]) -> bool:
        """Whether cosines and sines cover whole heads, are contiguous, and have the dtype of the rows.

        In OLMo they are in float32, so that terms are not rounded before they are added.
        """
        shape = (1, rows.shape[1], self.head_dim)
        return all(
            each.dtype == rows.dtype and each.shape == shape and each.is_contiguous() for each in position_embeddings
        )

    def __call__(
        self, rows: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], step: AttentionStep
    ) -> torch.Tensor:
        """Return the attention output, `[1, num_tokens, hidden_size]` like the rows. `takes` must be true."""
        num_tokens = rows.shape[1]
        cos, sin = (each[0] for each in position_embeddings)  # [num_tokens, head_dim]
        heads = self.qkv(rows).view(num_tokens, -1, self.head_dim)
        num_rotated = self.num_query_heads + self.num_kv_heads
        value = heads[:, num_rotated:]
        if self.norms:
            query, key = heads[:, : self.num_query_heads], heads[:, self.num_query_heads : num_rotated]
            query, key = (norm(each) for norm, each in zip(self.norms, (query, key), strict=True))
            query, key = self.rotate(query, cos, sin), self.rotate(key, cos, sin)
        else:
            both = self.rotate(heads[:, :num_rotated], cos, sin)
            query, key = both[:, : self.num_query_heads], both[:, self.num_query_heads :]
        attended = step.attend(AttentionCall(self.layer, query, key, value, self.scoring))
        return self.down(attended.reshape(1, num_tokens, -1))


def rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads by their positions, as transformers does; shapes as for `FusedAttention.rotate`."""
    cos, sin = cos[:, None], sin[:, None]
    half = heads.shape[-1] // 2
    turned = torch.cat((heads[..., half:].neg(), heads[..., :half]), -1)
    return (heads * cos).add_(turned.mul_(sin))


_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_CACHES = ("cache", "past_key_values")  # the keyword's name from transformers 5.24 on, and before
_LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_DECODER_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb"}
_DECODER_TRIAL_TOKENS = 3


class FusedCpuLayers(ReplacedParts):
    """Replaces known parts of a model whose linear layers are packed.

    Args:
        module: the model, on a CPU and in evaluation mode.
        is_exact: whether results must be batch-invariant.
        library: the C++ kernels; None to compute the operations between matmuls with PyTorch.

    Attributes:
        computes_rows_alone: whether all operations of the model are batch-invariant, even for a single row. This holds
            if all layers are known and their norms and matmuls are in C++.
    """

    def __init__(self, module: nn.Module, *, is_exact: bool, library: ctypes.CDLL | None = None) -> None:
        self._library = library
        self._native = None if library is None else NativeRows(library)
        self._dtype = next(module.parameters()).dtype
        self._is_exact = is_exact
        self._norms: dict[nn.Module, RowFunction] = {}
        self._mlps: dict[nn.Module, GatedMLP] = {}
        self._attentions: dict[nn.Module, FusedAttention] = {}
        self._layers: set[nn.Module] = set()
        self._in_one_call: dict[nn.Module, NativeLayerCall] = {}  # layers
        self._has_norms_of_torch = library is None
        self._tried_gates: set[tuple[int, int]] = set()  # by features in and out
        super().__init__(module, self._known_forward)
        self.computes_rows_alone = (
            not self._has_norms_of_torch
            and all(part in self._norms or _passes_rows_on(part) for part in _outside(module, self._layers))
            and not any(_row_counts(part) for part in module.modules())
        )

    def _known_forward(self, part: Any) -> Forward | None:
        if "forward" in vars(part):  # another library has replaced it
            return None
        children = dict(part.named_children())
        try:
            with torch.inference_mode():
                if is_norm(part, self._dtype):
                    self._norms[part] = self._try_norm(part)
                    return partial(_unless_hooked, hooks=(), replacement=self._norms[part])
                if children.keys() == MLP_PARTS and (
                    is_joined(part.gate_proj, part.up_proj, last=part.down_proj) or is_gated(part)
                ):
                    self._mlps[part] = self._try_mlp(part)
                    return partial(_unless_hooked, hooks=_hooks(children.values()), replacement=self._mlps[part])
                if children.keys() - _HEAD_NORMS == _ATTENTION_PARTS and is_joined(
                    part.q_proj, part.k_proj, part.v_proj, last=part.o_proj
                ):
                    self._attentions[part] = self._try_attention(part)
                    return partial(_attended, hooks=_hooks(children.values()), attention=self._attentions[part])
                if children.keys() == _LAYER_PARTS and self._knows(children):
                    forward = self._try_layer(part)
                    self._layers.add(part)
                    return forward
                if children.keys() == _DECODER_PARTS and self._in_one_call.keys() >= {*part.layers}:
                    return _try_decoder(part, [self._in_one_call[layer] for layer in part.layers])
        except Refused:
            raise
        except Exception as error:  # a module with another signature may raise anything
            raise Refused(reason_of(error)) from error
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
                self._has_norms_of_torch = True
                return normed
        raise Refused("it computes something else")

    def _try_mlp(self, mlp: Any) -> GatedMLP:
        native_gate = None if self._native is None else self._native.gate
        return try_mlp(mlp, self._dtype, is_exact=self._is_exact, gates=self._tried_gates, native_gate=native_gate)

    def _try_attention(self, module: Any) -> FusedAttention:
        steps = _RecordingStep(), _RecordingStep()
        simplified = with_replaced_children(module, {"o_proj": lambda rows: rows})
        size = module.head_dim
        norms = tuple(
            self._norms[getattr(module, name)] for name in sorted(_HEAD_NORMS, reverse=True) if hasattr(module, name)
        )
        if len(norms) == 1:
            raise Refused("it normalizes only one of queries and keys")
        layer_idx = kv_layer_of(module)
        known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by tokens

        def arguments_for(rows: torch.Tensor) -> dict[str, Any]:
            angles = torch.randn(1, rows.shape[1], size, generator=torch.Generator().manual_seed(rows.shape[1]))
            embeddings = known.setdefault(rows.shape[1], (angles.cos().to(rows), angles.sin().to(rows)))
            return {"position_embeddings": embeddings, "attention_mask": None}

        def own(rows: torch.Tensor) -> torch.Tensor:
            output, _ = simplified.forward(rows, **arguments_for(rows), radix_step=steps[0])
            return torch.cat((output, *steps[0].recorded), -1)

        def joined(rows: torch.Tensor) -> torch.Tensor:
            attention = make(lambda rows: rows)
            output = attention(rows, arguments_for(rows)["position_embeddings"], steps[1])
            return torch.cat((output, *steps[1].recorded), -1)

        def make(down: RowFunction) -> FusedAttention:
            assert steps[0].scoring is not None, "the module has run first"
            first: PackedSlice = module.q_proj
            return FusedAttention(
                layer=layer_idx,
                qkv=first.joined.matmul,
                num_query_heads=first.end // size,
                num_kv_heads=module.k_proj.out_features // size,
                head_dim=size,
                norms=norms,
                rotate=rotated if self._native is None else self._native.rotate,
                down=down,
                scoring=steps[0].scoring,
            )

        like = torch.empty(module.q_proj.in_features, dtype=self._dtype)
        require(agree(own, joined, like) and steps[0].scoring == steps[1].scoring and steps[0].layers == {layer_idx})
        return make(module.o_proj.matmul)

    def _knows(self, children: dict[str, nn.Module]) -> bool:
        return (
            children["input_layernorm"] in self._norms
            and children["post_attention_layernorm"] in self._norms
            and children["mlp"] in self._mlps
            and children["self_attn"] in self._attentions
        )

    def _try_layer(self, layer: Any) -> Forward:
        first, second = self._norms[layer.input_layernorm], self._norms[layer.post_attention_layernorm]

        def attend(hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            return hidden_states.roll(1, -1) / 2, None

        simplified = with_replaced_children(layer, {"self_attn": attend, "mlp": lambda rows: rows.flip(-1) / 4})

        def joined(rows: torch.Tensor) -> torch.Tensor:
            return _layered(rows, first, lambda rows: attend(rows)[0], second, lambda rows: rows.flip(-1) / 4)

        own = partial(simplified.forward, position_embeddings=None, attention_mask=None)
        require(agree(own, joined, layer.post_attention_layernorm.weight))
        attention, mlp, in_one_call = self._attentions[layer.self_attn], self._mlps[layer.mlp], None
        if self._library is not None and self._native is not None:
            in_one_call = layer_in_one_call(self._library, self._native, (first, second), attention, mlp)
            if in_one_call is not None:
                self._in_one_call[layer] = in_one_call
        hooks = _hooks(part for part in layer.modules() if part is not layer)
        return partial(
            _added, hooks=hooks, first=first, attention=attention, second=second, mlp=mlp, in_one_call=in_one_call
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


def _try_decoder(decoder: Any, calls: Sequence[NativeLayerCall]) -> Forward | None:
    """Return the forward pass of a decoder that computes its layers in one call; None if they cannot be joined.

    The trial replaces the layers, and checks what the decoder passes to them and what it does with their rows.

    Raises:
        Refused: it does something else than `_decoded`.
    """
    layers = NativeLayerCall.joined(calls) if len(calls) > 1 else None
    before_last = None if layers is None else NativeLayerCall.joined(calls[:-1])
    if layers is None or before_last is None:
        return None
    step, passed = _RecordingStep(), []

    def changed(rows: torch.Tensor) -> torch.Tensor:
        return rows.roll(1, -1) / 2

    def stand_in(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        passed.append(kwargs)
        return changed(hidden_states)

    def stand_in_for_all(rows: torch.Tensor, embeddings: tuple[torch.Tensor, torch.Tensor], _: AttentionStep) -> Any:
        require(len(passed) == len(decoder.layers))
        for kwargs in passed:
            require(_has_only_step(kwargs) and kwargs["radix_step"] is step)
            require(all(map(torch.equal, kwargs["position_embeddings"], embeddings)))
            rows = changed(rows)
        return rows

    ids = torch.arange(_DECODER_TRIAL_TOKENS)[None]
    given: dict[str, Any] = {"input_ids": ids, "position_ids": ids, "use_cache": False, "radix_step": step}
    simplified = copy.copy(decoder)
    stand_ins = nn.ModuleList(nn.Module() for _ in decoder.layers)
    for each in stand_ins:
        each.forward = stand_in
    simplified._modules = {**decoder._modules, "layers": stand_ins}
    expected = simplified.forward(**given)
    decoded = partial(_decoded, takes=layers.takes, before_last=before_last)
    got = decoded(decoder, hooks=(), last_hooks=(), layers=stand_in_for_all, **given)
    require(type(expected) is type(got) and torch.equal(expected.last_hidden_state, got.last_hidden_state))
    last = decoder.layers[-1]
    hooks = _hooks(part for part in decoder.modules() if part is not decoder and part is not last)
    return partial(decoded, hooks=hooks, last_hooks=_hooks([last]), layers=layers)


def _outside(part: nn.Module, layers: Set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the parts of a model, including the model itself, that are not inside these layers."""
    if part not in layers:
        yield part
        for child in part.children():
            yield from _outside(child, layers)


def _passes_rows_on(part: nn.Module) -> bool:
    """Whether a part only selects rows, applies matmuls or elementwise functions, or calls its children."""
    is_known = isinstance(part, PreTrainedModel | nn.ModuleList | nn.Embedding | QuantizedEmbedding | PackedLinear)
    return is_known or type(part).__name__.endswith("RotaryEmbedding")


def _row_counts(part: nn.Module) -> tuple[int, ...]:
    if isinstance(part, PackedSlice):
        return part.joined.matmul.row_counts
    return part.matmul.row_counts if isinstance(part, PackedLinear) else ()


def _unless_hooked(
    part: nn.Module, rows: torch.Tensor, *, hooks: Sequence[Mapping[int, object]], replacement: RowFunction
) -> Any:
    if any(hooks):
        return type(part).forward(part, rows)
    with torch._C.DisableTorchFunction():  # the replacement is exact by itself
        return replacement(rows)


def _attended(
    part: Any,
    hidden_states: torch.Tensor,
    *args: Any,
    hooks: Sequence[Mapping[int, object]],
    attention: FusedAttention,
    **kwargs: Any,
) -> Any:
    with torch._C.DisableTorchFunction():
        if not (args or any(hooks)) and _can_join(hidden_states, kwargs, attention):
            return attention(hidden_states, kwargs["position_embeddings"], kwargs["radix_step"]), None
    return type(part).forward(part, hidden_states, *args, **kwargs)


def _added(
    layer: Any,
    hidden_states: torch.Tensor,
    *args: Any,
    hooks: Sequence[Mapping[int, object]],
    first: RowFunction,
    attention: FusedAttention,
    second: RowFunction,
    mlp: RowFunction,
    in_one_call: NativeLayerCall | None,
    **kwargs: Any,
) -> Any:
    with torch._C.DisableTorchFunction():
        if not (args or any(hooks)) and _can_join(hidden_states, kwargs, attention):
            embeddings, step = kwargs["position_embeddings"], kwargs["radix_step"]
            layered = None if in_one_call is None else in_one_call(hidden_states, embeddings, step)
            if layered is not None:
                return layered
            return _layered(hidden_states, first, lambda rows: attention(rows, embeddings, step), second, mlp)
    return type(layer).forward(layer, hidden_states, *args, **kwargs)


def _decoded(
    decoder: Any,
    *args: Any,
    hooks: Sequence[Mapping[int, object]],
    last_hooks: Sequence[Mapping[int, object]],
    layers: Callable[..., torch.Tensor | None],
    before_last: Callable[..., torch.Tensor | None],
    takes: Callable[..., bool],
    input_ids: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    radix_step: AttentionStep | None = None,
    **kwargs: Any,
) -> Any:
    is_known = not args and all(each is None or each is False for each in kwargs.values())
    if is_known and input_ids is not None and position_ids is not None and not any(hooks):
        rows = decoder.embed_tokens(input_ids)
        embeddings = decoder.rotary_emb(rows, position_ids)
        calls_last = any(last_hooks)  # such as that of `LastLayer`, which computes only some rows
        in_one_call = before_last if calls_last else layers
        with torch._C.DisableTorchFunction():
            layered = in_one_call(rows, embeddings, radix_step) if takes(rows, embeddings) else None
        if layered is not None:
            if calls_last:
                layered = decoder.layers[-1](layered, position_embeddings=embeddings, radix_step=radix_step)
            return BaseModelOutputWithPast(last_hidden_state=decoder.norm(layered))
    kwargs |= {"input_ids": input_ids, "position_ids": position_ids}
    kwargs |= {} if radix_step is None else {"radix_step": radix_step}
    return type(decoder).forward(decoder, *args, **kwargs)


def _hooks(parts: Iterable[nn.Module]) -> list[Mapping[int, object]]:
    """List the forward hooks of modules. The mappings are those of the modules, which may change them."""
    return [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]


def _layered(
    rows: torch.Tensor, first: RowFunction, attend: RowFunction, second: RowFunction, mlp: RowFunction
) -> torch.Tensor:
    rows = rows + attend(first(rows))
    return rows + mlp(second(rows))


def _can_join(rows: torch.Tensor, kwargs: dict[str, Any], attention: FusedAttention) -> bool:
    """Whether a layer is called as in its trial: with a step, a rotary embedding that it takes, and no mask."""
    rotations = kwargs.get("position_embeddings")
    return rotations is not None and attention.takes(rows, rotations) and _has_only_step(kwargs)


def _has_only_step(kwargs: dict[str, Any]) -> bool:
    """Whether a layer gets a step, and neither a mask nor a cache."""
    has_others = any(kwargs.get(name) is not None for name in ("attention_mask", *_CACHES))
    return kwargs.get("radix_step") is not None and not has_others
