"""The embedded model: a small Llama, trained on English text of the 17th and the 19th century."""

from __future__ import annotations

import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import torch
from safetensors.torch import load, save
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from radixkv.errors import ConfigError
from radixkv.model.tiny_files import CONFIG

_WEIGHTS_FILE = "weights.safetensors"
_DIGEST_SUFFIX = ".sha256"


def shipped_weights() -> Traversable:
    """Return the file of weights in the package."""
    return files("radixkv.model") / "tiny" / _WEIGHTS_FILE


def load_weights(file: Traversable) -> dict[str, torch.Tensor]:
    """Read weights by name, bfloat16.

    Args:
        file: the weights. `<file>.sha256` next to it has their digest, in the format of `sha256sum`.

    Raises:
        ConfigError: a file is missing, or the digest does not match.
    """
    try:
        content = file.read_bytes()
        expected = _digest_file(file).read_text(encoding="ascii").split()[0]
    except (OSError, IndexError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.path: tiny: expected {file} and its digest, got {error!r}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != expected:
        raise ConfigError(f"model.path: tiny: expected {file} with sha256 {expected}, got {digest}: it is damaged")
    return load(content)


def write_weights(module: PreTrainedModel, path: Path) -> None:
    """Write a model's weights in bfloat16, tied weights only once, and their digest to a second file."""
    tied_names = set(module._tied_weights_keys or ()) if module.config.tie_word_embeddings else set()
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in module.state_dict().items()
        if name not in tied_names
    }
    content = save(tensors, {"format": "pt"})
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    path.with_name(path.name + _DIGEST_SUFFIX).write_text(f"{digest}  {path.name}\n", encoding="ascii")


def _digest_file(file: Traversable) -> Traversable:
    return Path(str(file) + _DIGEST_SUFFIX)


def tiny_config() -> LlamaConfig:
    """Return the configuration of the embedded model: four layers with 4 million parameters, and 512 token ids."""
    return LlamaConfig(**CONFIG)


def build_tiny_model(attention: str) -> LlamaForCausalLM:
    """Create the model in float32, with the weights in the package. Does not access the network.

    Args:
        attention: name of the attention implementation.

    Raises:
        ConfigError: the file of weights is missing or damaged.
    """
    weights = load_weights(shipped_weights())
    config = tiny_config()
    config._attn_implementation = attention
    with torch.random.fork_rng(devices=[]):  # initialization must not change the caller's random state
        module = LlamaForCausalLM(config)
    unfit_keys = module.load_state_dict(weights, strict=False)
    assert not unfit_keys.unexpected_keys
    assert set(unfit_keys.missing_keys) == set(module._tied_weights_keys), "expected all weights but tied ones"
    return module
