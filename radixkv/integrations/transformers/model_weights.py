"""The weights and adapters of a model: detects changes, and computes digests of everything that K/V depend on."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from xxhash import xxh3_128

from radixkv.errors import UnsupportedModel
from radixkv.integrations.transformers.kv_slots import KV

_PIECE_BYTES = 64 << 20


class WeightVersions:
    """The weights of a model and the versions that PyTorch counts, to detect changes.

    Weights are the parameters and the persistent buffers, in which quantized layers keep their weights. Other buffers
    are left out, since some models replace them in each forward pass, such as the frequencies of RoPE. PyTorch does not
    count changes of `.data`, nor of tensors that were created in `torch.inference_mode`.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._versions = [(weakref.ref(each), each.data_ptr(), _version(each)) for _, each in _weights(model)]

    def are_current(self) -> bool:
        """Whether no tensor was added, removed, replaced, moved or changed. Complexity: O(tensors)."""
        weights = list(_weights(self._model))
        return len(weights) == len(self._versions) and all(
            reference() is each and (pointer, version) == (each.data_ptr(), _version(each))
            for (_, each), (reference, pointer, version) in zip(weights, self._versions, strict=True)
        )


class ActiveAdapters:
    """The LoRA adapters of a model, which PEFT inserts as layers.

    Args:
        model: the model. This object becomes outdated if PEFT inserts further layers. That also adds parameters, which
            `WeightVersions` detects.
    """

    def __init__(self, model: Any) -> None:
        self._layers = [(name, each) for name, each in model.named_modules() if hasattr(each, "merged_adapters")]

    def describe_active(self) -> str:
        """Describe which adapters are active in which layers, and how strongly; empty without any layer."""
        described = [
            (name, tuple(each.active_adapters), each.disable_adapters, tuple(each.merged_adapters), _scaling(each))
            for name, each in self._layers
        ]
        return repr(described) if described else ""


def digest_of_model(model: Any) -> str:
    """Digest the class, the configuration and all weights of a model.

    Complexity: it reads all weights, at up to 10 GB/s on a CPU.

    Raises:
        UnsupportedModel: some weights are not in memory.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    name_of_class = f"{type(model).__module__}.{type(model).__name__}"  # of remote code, it contains the revision
    digest = xxh3_128(f"{name_of_class} {json.dumps(config, sort_keys=True, default=str)}".encode())
    for name, weight in _weights(model):
        if weight.is_meta:
            raise UnsupportedModel(f"tiers: expected all weights in memory, got {name} offloaded")
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        weight_bytes = weight.detach().reshape(-1).view(torch.uint8)
        for start in range(0, weight_bytes.numel(), _PIECE_BYTES):
            digest.update(weight_bytes[start : start + _PIECE_BYTES].cpu().numpy().data)
    return digest.hexdigest()


def describe_computation(model: Any, kv: Mapping[int, KV]) -> str:
    """Describe what else the bits of K/V depend on: libraries, kernels, devices, hooks, frequencies of RoPE.

    Args:
        model: the model.
        kv: K/V of a test prompt by layer. A digest of them covers hooks and the frequencies of RoPE.
    """
    kv_digest = xxh3_128()
    for _, states in sorted(kv.items()):
        for each in states:
            kv_digest.update(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    devices = sorted({each.device.type for _, each in _weights(model)})
    gpu_names = [torch.cuda.get_device_name()] if "cuda" in devices else []
    libraries = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return ", ".join([libraries, str(model.config._attn_implementation), *devices, *gpu_names, kv_digest.hexdigest()])


def _weights(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, each in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", each


def _version(weight: torch.Tensor) -> int:
    return -1 if weight.is_inference() else weight._version  # inference tensors have no version


def _scaling(layer: Any) -> tuple[tuple[str, float], ...]:
    return tuple(getattr(layer, "scaling", {}).items())
