"""Connects the adapters of a model to an engine, and loads those of the configuration."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from radixkv.config import AdapterConfig, Config
from radixkv.engine.adapters.adapter_directory import AdapterDirectory
from radixkv.engine.adapters.adapters import Adapters, AdapterSource
from radixkv.errors import ConfigError, InvalidAdapter
from radixkv.model.adapters.adapter_config import CONFIG_FILE, TENSOR_FILE
from radixkv.model.adapters.adapter_files import AdapterFiles, read_adapter
from radixkv.model.model import Model
from radixkv.model.report import Report, report_nothing
from radixkv.startup.openmp_threads import end_openmp_threads

# The size limit of an adapter file, as a multiple of `model.adapter_bytes`: a number may take eight bytes in the file,
# and two bytes on the device.
_FILE_SIZE_FACTOR = 4

_log = logging.getLogger(__name__)


def adapter_source(config: Config, model: Model) -> AdapterSource | None:
    """Return the device side of a model's adapters; None if they are off."""
    if model.adapted is None:
        return None
    return AdapterSource(
        config.max_adapters,
        model.adapted.adapters,
        partial(_read, model=model, max_bytes=_FILE_SIZE_FACTOR * config.model.adapter_bytes),
        AdapterDirectory(config.model.adapter_directory, (CONFIG_FILE, TENSOR_FILE)),
    )


def _read(path: str | Path, model: Model, max_bytes: int) -> AdapterFiles:
    """Read an adapter, and end the OpenMP threads that PyTorch has started for the calling thread."""
    try:
        return read_adapter(path, model, max_bytes)
    finally:
        end_openmp_threads()


def load_adapters(sections: Mapping[str, AdapterConfig], adapters: Adapters, report: Report = report_nothing) -> None:
    """Load the adapters of a configuration, before the engine is started.

    Args:
        sections: the sections `adapters.NAME`, by name.
        adapters: the adapters of the engine.
        report: called with a description of each load.

    Raises:
        ConfigError: the message names the section.
    """
    for name, section in sections.items():
        report(f"loading adapter {name}")
        start_s = time.perf_counter()
        try:
            loaded = adapters.load_now(name, Path(section.path)).adapter
        except InvalidAdapter as error:
            raise ConfigError(f"adapters.{name}.path: {error}") from error
        took_s = time.perf_counter() - start_s
        megabytes = loaded.num_bytes / 1e6
        _log.info("loaded adapter %s of rank %d, %.1f MB, in %.1f s", name, loaded.rank, megabytes, took_s)
