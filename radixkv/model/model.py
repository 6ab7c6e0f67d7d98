"""A transformers model whose attention works on the block pool."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from radixkv.config.sequence_limit import SequenceLimit, sequence_limit
from radixkv.errors import UnknownAdapter, UnsupportedModel
from radixkv.model.adapters.adapted_layers import AdaptedLayers, LowRankBackend
from radixkv.model.adapters.adapter_files import AdapterFiles
from radixkv.model.adapters.adapter_set import AdapterRange
from radixkv.model.adapters.low_rank_matmuls import LowRankMatmuls
from radixkv.model.architecture import check_windows
from radixkv.model.attention.interface import AttentionStep, AttentionUse
from radixkv.model.attention.latent import LatentParts
from radixkv.model.attention.paged_step import PaddedStep, RunningPass
from radixkv.model.attention.probe import probe_attention
from radixkv.model.end_tokens import end_token_ids
from radixkv.model.exactness import make_exact, padded_tokens
from radixkv.model.fingerprint import fingerprint_model
from radixkv.model.last_layer import LastLayer, LastLayerRows, can_shorten_last_layer
from radixkv.model.layers.cpu_layers import FusedCpuLayers
from radixkv.model.layers.gemm_tuner import GemmTuner, TrialBudget
from radixkv.model.layers.packed_linear import merge_linears, pack_linears
from radixkv.model.on_cpu import native_library
from radixkv.model.on_gpu import fuse_layers, low_rank_kernels
from radixkv.model.report import Report, report_nothing
from radixkv.model.states.short_convs import ShortConvs
from radixkv.storage.device_pool import KVShape
from radixkv.storage.state_pool import StateShape


class Model:
    """A causal language model, ready for prefill.

    Args:
        name: `tiny`, or see `ModelLocation`.
        module: a loaded model.
        device: device to which the model is moved.
        is_exact: whether the model runs in exact mode.
        is_fused: True runs known parts as fused Triton kernels, and merges linear layers unless adapters may be loaded;
            False does neither. On a GPU, None means True; on a CPU, it packs linear layers and fuses known parts
            with `FusedCpuLayers`.
        weights: `auto`, or on a CPU a quantized format; see `ModelConfig`.
        max_adapters: maximum number of loaded adapters. 0 disables adapters, which allows a GEMM library to fuse
            SwiGLU.
        adapter_bytes: maximum bytes of adapters on the device; see `AdapterSet`.
        fingerprint: a fixed value for models of benchmarks, whose K/V is never stored; None to digest all weights.
        directory: directory whose files name the end-of-sequence tokens. Without it, or if they name none, the
            configurations of `module` determine these tokens.
        report: called with a description of each phase of the construction.

    Attributes:
        name: the argument `name`.
        device: the argument `device`.
        module: the transformers model, in evaluation mode on `device`.
        num_parameters: numbers in its weights.
        kv_shape: K and V of one token.
        state_shape: the state that layers keep per sequence in addition to K and V; None if none does.
        attention_kinds: the kinds of attention of its layers, each kind once.
        windows: for each layer with K and V, the number of tokens that a query sees, including its own; None for all.
        vocab_size: token ids are below this.
        is_exact: whether a token's K, V and logits depend only on its prefix, bit for bit.
        limit: the longest sequence, and the reason if the model's files state a longer one.
        max_tokens: tokens of the longest sequence; None if the model's configuration does not state a limit.
        eos_token_ids: tokens of the vocabulary that end a generation.
        weights: the argument `weights`.
        can_shorten_last_layer: whether the last layer can compute only the rows of `LastLayerRows` with the same
            results. CPU only.
        latent: its layers with latent attention.
        adapted: its layers with adapters; None if no adapters may be loaded.
        fingerprint: see `fingerprint_model`.
    """

    def __init__(
        self,
        name: str,
        module: PreTrainedModel,
        device: torch.device,
        *,
        is_exact: bool = True,
        is_fused: bool | None = None,
        weights: str = "auto",
        max_adapters: int = 0,
        adapter_bytes: int = 2**30,
        fingerprint: str | None = None,
        directory: Path | None = None,
        report: Report = report_nothing,
    ) -> None:
        self.name = name
        self.device = device
        self.is_exact = is_exact
        if fingerprint is None:  # before the weights are packed
            report("hashing the weights")
            fingerprint = fingerprint_model(module, weights, is_exact=is_exact)
        self.fingerprint = fingerprint

        self.module = module.to(device).eval().requires_grad_(False)
        self.num_parameters = sum(parameter.numel() for parameter in module.parameters())
        self.weights = weights
        self.adapted: AdaptedLayers[Any] | None = None

        # The order matters: latent attention and short convolutions are replaced before linear layers are packed,
        # adapters are hooked in afterwards, and parts are fused last.
        budget = TrialBudget(report=report)
        self.latent = LatentParts(module, is_exact=is_exact, budget=budget)
        short_convs = ShortConvs(module)
        self.state_shape: StateShape | None = short_convs.shape
        tuner = GemmTuner(is_exact=is_exact, weights=weights, budget=budget)
        is_packed = device.type == "cpu" and is_fused is None
        library = None
        if is_packed:
            report("loading or compiling the C++ kernels")
            library = native_library()  # before GEMM backends are chosen, since it adds one
            pack_linears(module, tuner, may_gate=not max_adapters)
        if max_adapters:
            backend = _low_rank_backend(device, is_exact=is_exact)
            self.adapted = AdaptedLayers(module, backend, max_adapters, adapter_bytes)
        # Each of these functions returns a context manager that restores some parts of transformers; see `unfused`.
        self._originals: list[Callable[[], AbstractContextManager[None]]] = [
            self.latent.originals,
            short_convs.originals,
        ]
        self._pads_rows = is_exact
        uses_triton = device.type == "cuda" if is_fused is None else is_fused
        if uses_triton:
            if not max_adapters:
                merge_linears(module)
            self._originals.append(fuse_layers(module, is_exact=is_exact))
        elif is_packed:
            report("comparing layers in C++ with those of transformers")
            fused_layers = FusedCpuLayers(module, is_exact=is_exact, library=library)
            self._originals.append(fused_layers.originals)
            self._pads_rows = is_exact and not fused_layers.is_invariant_for_one_row
        self._exact_mode: AbstractContextManager[object] = (
            make_exact(module, budget) if is_exact else contextlib.nullcontext()
        )

        self._hidden_states: torch.Tensor | None = None  # [1, num_tokens, hidden_size], during a forward pass
        self._running = RunningPass()
        for submodule in module.modules():
            if hasattr(submodule, "layer_idx"):
                submodule.running_pass = self._running
        for submodule in module.modules():  # `module` calls its `base_model`, or only a decoder inside that
            if isinstance(submodule, PreTrainedModel) and submodule is not module:
                submodule.register_forward_hook(self._keep_hidden_states)
        self._last_layer = LastLayer(module, self._running)

        report("looking at the attention of each layer")
        config = module.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.limit = _limit(config)
        self.max_tokens = self.limit.max_tokens
        ids_in_files = frozenset[int]() if directory is None else end_token_ids(directory, self.vocab_size)
        self.eos_token_ids = ids_in_files or _eos_token_ids(module, self.vocab_size)
        self.kv_shape, self._layer_kinds = probe_attention(
            type(module).__name__, self.forward, device, int(config.num_hidden_layers)
        )
        self.attention_kinds = tuple(dict.fromkeys(self._layer_kinds))
        self.windows = tuple(kind.window for kind in self._layer_kinds)
        check_windows(type(module).__name__, config, (kind.window for kind in self.attention_kinds), self.max_tokens)
        self.can_shorten_last_layer = device.type == "cpu" and can_shorten_last_layer(
            self.forward, self.vocab_size, self.kv_shape.dtype, is_exact=is_exact
        )

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        step: AttentionStep,
        logit_rows: torch.Tensor,
        adapters: Sequence[AdapterRange] = (),
        last_rows: LastLayerRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a forward pass over packed tokens of several requests. `step` knows which token belongs to which request.

        Args:
            input_ids: int64 `[num_tokens]`.
            position_ids: int64 `[num_tokens]`, absolute positions.
            step: computes the attention of each layer.
            logit_rows: int64 `[n]`, the rows whose logits are returned.
            adapters: disjoint ranges of rows that use an adapter; all other rows use the base model.
            last_rows: the rows that the last layer computes: those of `logit_rows`, or an arbitrary row if there are
                none. None computes all rows, and is required with adapters or if `can_shorten_last_layer` is False.

        Returns:
            Logits, float32 `[n, vocab_size]`, and bool `[num_tokens]`: whether the last hidden state of each token is
            finite; True where it was not computed.

        Raises:
            UnsupportedModel: the model needs something that the attention kernels do not support.
            UnknownAdapter: one of the adapters is not loaded.
        """
        num_tokens = input_ids.numel()
        if self._pads_rows:
            padding = (0, padded_tokens(num_tokens, self.device) - num_tokens)
            input_ids, position_ids = pad(input_ids, padding), pad(position_ids, padding)
        if self.is_exact:
            step = PaddedStep(step, num_tokens)

        with (
            self._exact_mode,
            self._with_adapters(adapters),
            self._running.with_step(step),
            contextlib.ExitStack() as stack,
        ):
            if last_rows is not None:
                num_rows = len(last_rows.rows)
                if self._pads_rows:
                    num_rows = padded_tokens(num_rows, self.device)
                stack.enter_context(self._last_layer.shortened(last_rows, num_rows, num_tokens))
            output = self.module(
                input_ids=input_ids[None],
                position_ids=position_ids[None],
                use_cache=False,
                logits_to_keep=logit_rows if last_rows is None else torch.arange(len(logit_rows)),
                radix_step=step,
            )

        if self._hidden_states is None:
            raise UnsupportedModel(
                f"{type(self.module).__name__}: expected a base model that returns its last hidden states, got none"
            )
        hidden_states = self._hidden_states[0, : num_tokens if last_rows is None else len(last_rows.rows)]
        is_finite = hidden_states.isfinite().all(dim=-1)
        if last_rows is not None:
            is_finite = is_finite.new_ones(num_tokens).index_put((last_rows.rows,), is_finite)
        self._hidden_states = None
        return output.logits[0].float(), is_finite

    def attention_uses(self, shape: KVShape, block_size: int) -> tuple[AttentionUse, ...]:
        """Return what the model requires of attention kernels, for each K/V shape of its layers.

        Args:
            shape: shape and format of K and V in the pools.
            block_size: tokens per block.
        """
        return tuple(
            AttentionUse(
                kinds=tuple(dict.fromkeys(self._layer_kinds[layer] for layer in layers)),
                dtype=self.kv_shape.dtype,
                shape=shape.of(layers),
                block_size=block_size,
                device=self.device,
                is_exact=self.is_exact,
            )
            for layers in shape.layers_by_heads
        )

    def try_adapter(self, files: AdapterFiles) -> None:
        """Check the matmuls of an adapter. May be called on any thread, so that the engine's thread does not wait.

        Raises:
            InvalidAdapter: the matmuls are not batch-invariant on this machine, or a GPU does not support the rank.
        """
        if self.adapted is not None:
            self.adapted.try_out(files)

    @contextlib.contextmanager
    def unfused(self) -> Iterator[None]:
        """Restore transformers' own implementation of `module`, inside the `with` block."""
        with contextlib.ExitStack() as stack:
            for originals in self._originals:
                stack.enter_context(originals())
            yield

    def _with_adapters(self, ranges: Sequence[AdapterRange]) -> AbstractContextManager[object]:
        if not ranges:
            return contextlib.nullcontext()
        if self.adapted is None:
            raise UnknownAdapter(f"adapter: expected none, since model.max_adapters is 0, got {ranges[0].digest}")
        return self.adapted.applied(ranges)

    def _keep_hidden_states(self, module: torch.nn.Module, arguments: object, output: Any) -> None:
        """Keep the last hidden states. A PyTorch hook, which the outermost submodule that returns them calls last."""
        self._hidden_states = getattr(output, "last_hidden_state", self._hidden_states)


def _low_rank_backend(device: torch.device, *, is_exact: bool) -> LowRankBackend[Any]:
    if device.type == "cuda":
        return low_rank_kernels(device, is_exact=is_exact)
    return LowRankMatmuls(GemmTuner(is_exact=is_exact))


def _limit(config: Any) -> SequenceLimit:
    names = ("max_position_embeddings", "original_max_position_embeddings", "rope_parameters")
    return sequence_limit({name: getattr(config, name, None) for name in names})


def _eos_token_ids(module: PreTrainedModel, vocab_size: int) -> frozenset[int]:
    """Return the end-of-sequence tokens of the generation configuration, or else of the model configuration."""
    for config in (getattr(module, "generation_config", None), module.config.get_text_config()):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            ids = ids if isinstance(ids, list) else [ids]
            return frozenset(token_id for token_id in ids if 0 <= token_id < vocab_size)
    return frozenset()
