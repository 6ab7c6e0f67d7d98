"""The sections of the model and of its adapters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from radixkv.config.bounds import OneOf, Range, require_fields
from radixkv.errors import ConfigError

_DEFAULT_ADAPTER_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model that is served, its device, and the bounds of its adapters.

    Attributes:
        path: `tiny` for the embedded model, or a directory with config.json and safetensors.
        device: `auto`, `cpu` or `cuda`. `auto` takes a CUDA device if there is one.
        dtype: `auto` (what the checkpoint says), `float32`, `bfloat16` or `float16`.
        exactness: `exact`, where a hit never changes a bit of an answer, or `fast`.
        weights: `auto` (as `dtype` says), or `int8` on a CPU: linear layers have 8 bits a weight, one scale for each
            output feature, and round their inputs to 8 bits as well, one scale for each token. Embeddings, norms and
            experts keep their dtype.
        threads: threads that compute on the CPU. Without it, `OMP_NUM_THREADS`, or else one per physical core within
            the CPU affinity and the cgroup quota.
        max_adapters: different LoRA adapters that may be loaded; as many more may still drain. 0 switches adapters
            off, unless there are sections `adapters.NAME`: then as many as these.
        adapter_bytes: device memory of adapters; those used last are kept there, the others in host memory.
        adapter_directory: directory below which `LoadAdapter` may load adapters. Empty: it may load none.
    """

    path: str = "tiny"
    device: Annotated[str, OneOf("auto", "cpu", "cuda")] = "auto"
    dtype: Annotated[str, OneOf("auto", "float32", "bfloat16", "float16")] = "auto"
    exactness: Annotated[str, OneOf("exact", "fast")] = "exact"
    weights: Annotated[str, OneOf("auto", "int8")] = "auto"
    threads: Annotated[int, Range(1, 8192)] | None = None
    max_adapters: Annotated[int, Range(0, 4096)] = 0
    adapter_bytes: Annotated[int, Range(1)] = _DEFAULT_ADAPTER_BYTES
    adapter_directory: str = ""

    def __post_init__(self) -> None:
        require_fields("model", self)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """An adapter that is loaded at start, from a section `adapters.NAME`.

    Attributes:
        path: directory with adapter_config.json and adapter_model.safetensors, as peft writes it.
    """

    path: str = ""

    def require(self, path: str) -> None:
        """Refuse a section without a path; `Config` calls this, since only it knows the section's name.

        Args:
            path: `adapters.NAME`.

        Raises:
            ConfigError: the message names the key.
        """
        require_fields(path, self)
        if path == "adapters.":
            raise ConfigError("adapters: expected a name for each section, got an empty one, which is the model itself")
        if not self.path:
            raise ConfigError(f"{path}.path: expected a directory, got an empty text")
