"""Fingerprints of everything that K/V depend on. Namespaces, and K/V that other processes read, are identified by them.

model       configuration with its RoPE settings, all weights and buffers, dtype, the format of weights, exact mode
K/V         the model, the dtype and the layout of K and V in the pool, tokens per block
"""

from __future__ import annotations

import json
import logging
import time

import torch
from transformers import PreTrainedModel
from xxhash import xxh3_128

from radixkv.model.layers.stored_weight import stored_weight

_log = logging.getLogger(__name__)

# Keys of config.json that describe the origin of a model and do not affect its results.
_WITHOUT_EFFECT = ("_name_or_path", "transformers_version", "architectures")


def fingerprint_model(module: PreTrainedModel, weights: str, *, is_exact: bool) -> str:
    """Digest a model, including all bytes of its weights. Logs how long it took.

    Weights that stay quantized as in their file (`stored_weight`) are hashed as codes, scales and minima.

    Equal models have equal digests, whatever directory they were read from. XXH3 is not cryptographic: models that were
    constructed to collide may also have equal digests.

    Complexity: 5 to 20 GB are hashed per second, so a model of 16 GB takes 1 to 3 s.

    Args:
        module: the model, before its weights are repacked and before it is moved to a GPU.
        weights: format of the weights of linear layers; see `ModelConfig`.
        is_exact: whether it will run in exact mode, in which the last bits of K/V differ.
    """
    start_s, num_bytes = time.perf_counter(), 0
    config = {key: value for key, value in module.config.to_dict().items() if key not in _WITHOUT_EFFECT}
    digest = xxh3_128(json.dumps([weights, is_exact, config], sort_keys=True, default=str).encode())
    quantized_weights = {f"{name}.weight": stored_weight(part) for name, part in module.named_modules()}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        hashed: tuple[torch.Tensor | None, ...] = (tensor,)
        quantized = quantized_weights.get(name)
        if quantized is not None:
            hashed = (quantized.codes, quantized.scales, quantized.minima)
        for each in hashed:
            if each is None:
                continue
            digest.update(json.dumps([name, list(each.shape), str(each.dtype)]).encode())
            bytes_of_tensor = each.detach().cpu().reshape(-1).view(torch.uint8).numpy()
            digest.update(bytes_of_tensor.data)
            num_bytes += bytes_of_tensor.nbytes
    took_s = time.perf_counter() - start_s
    _log.info("read %.1f MB of weights for the model's fingerprint in %.2f s", num_bytes / 1e6, took_s)
    return digest.hexdigest()


def fingerprint_kv(model: str, stored_as: str, block_size: int) -> str:
    """Digest everything that cached blocks depend on besides tokens, tenant, adapter and salt.

    Args:
        model: the result of `fingerprint_model`.
        stored_as: how K and V are stored.
        block_size: tokens per block.
    """
    return xxh3_128(json.dumps([model, stored_as, block_size]).encode()).hexdigest()
