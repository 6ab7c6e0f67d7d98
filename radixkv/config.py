"""Configuration: frozen dataclasses, read from TOML and then from `section.key=value` settings."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from radixkv.errors import ConfigError

KV_DTYPES = ("auto", "bf16", "fp8", "int8", "int4")
EVICTION_POLICIES = ("adaptive", "lru", "slru", "lfu", "priority")

_MAX_INT32 = 2**31 - 1
MAX_BLOCKS = _MAX_INT32  # block ids are int32
_DEFAULT_CAPACITY_TOKENS = 131_072
_KEY = re.compile(r'"[^"]+"|[^".]+')
_YEAR_S = 366 * 24 * 3600  # clocks and time stamps overflow far beyond it


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model is served, and where.

    Attributes:
        path: `tiny` for the embedded model, or a directory with config.json and safetensors.
        device: `auto`, `cpu` or `cuda`. `auto` takes a CUDA device if there is one.
        dtype: `auto` (what the checkpoint says), `float32`, `bfloat16` or `float16`.
        exactness: `exact`, so that a hit never changes a bit of an answer, or `fast`.
    """

    path: str = "tiny"
    device: str = "auto"
    dtype: str = "auto"
    exactness: str = "exact"

    def __post_init__(self) -> None:
        _require_one_of("model.device", self.device, ("auto", "cpu", "cuda"))
        _require_one_of("model.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _require_one_of("model.exactness", self.exactness, ("exact", "fast"))


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The block pool and what stays in it.

    Attributes:
        block_size: tokens a block; 16, 32 or 64.
        capacity_tokens: tokens that the pool holds; rounded down to whole blocks. Without it, a GPU's pool is as large
            as `memory_share` allows, and on a CPU it holds 131,072.
        memory_share: what part of a GPU's memory may be in use, by weights, steps, pool and other programs together.
        kv_dtype: how K and V are stored; one of `KV_DTYPES`. `auto` is the model's own dtype; fp8, int8 and int4 have
            a scale for each token and head.
        evicted_prefixes: how many evicted prefixes are remembered to explain later misses.
        policy: which unused blocks go first; one of `EVICTION_POLICIES`.
        max_retained_share: what part of the pool may have a priority above the default, 0 to 1.
    """

    block_size: int = 64
    capacity_tokens: int | None = None
    memory_share: float = 0.9
    kv_dtype: str = "auto"
    evicted_prefixes: int = 65_536
    policy: str = "adaptive"
    max_retained_share: float = 0.2

    def __post_init__(self) -> None:
        _require_one_of("cache.block_size", self.block_size, (16, 32, 64))
        if self.capacity_tokens is not None:
            _require_at_least("cache.capacity_tokens", self.capacity_tokens, self.block_size)
            _require_at_most("cache.capacity_tokens", self.capacity_tokens, MAX_BLOCKS * self.block_size)
        _require_at_least("cache.memory_share", self.memory_share, 0)
        _require_at_most("cache.memory_share", self.memory_share, 1)
        _require_one_of("cache.kv_dtype", self.kv_dtype, KV_DTYPES)
        _require_at_least("cache.evicted_prefixes", self.evicted_prefixes, 0)
        _require_one_of("cache.policy", self.policy, EVICTION_POLICIES)
        _require_at_least("cache.max_retained_share", self.max_retained_share, 0)
        _require_at_most("cache.max_retained_share", self.max_retained_share, 1)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, if it is not as large as a GPU allows."""
        capacity_tokens = _DEFAULT_CAPACITY_TOKENS if self.capacity_tokens is None else self.capacity_tokens
        return capacity_tokens // self.block_size


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How requests become steps.

    Attributes:
        max_step_tokens: tokens that one forward pass computes at most; longer suffixes are split into chunks.
        max_running_requests: requests that may hold blocks at the same time.
        max_waiting_requests: so many more may be unfinished; further ones are refused with RESOURCE_EXHAUSTED.
        max_tenant_requests: of these a single tenant may have so many unfinished.
        held_lease_ttl_s: seconds after which a held lease is released by itself.
        step_timeout_s: a step that takes longer hangs: all requests are cancelled, and new ones refused until it ends.
        cuda_graphs: whether short steps are recorded at load, on a GPU, so that each is a single launch.
    """

    max_step_tokens: int = 512
    max_running_requests: int = 64
    max_waiting_requests: int = 4096
    max_tenant_requests: int = 2048
    held_lease_ttl_s: float = 60.0
    step_timeout_s: float = 300.0
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        _require_at_least("engine.max_step_tokens", self.max_step_tokens, 1)
        _require_at_least("engine.max_running_requests", self.max_running_requests, 1)
        _require_at_least("engine.max_waiting_requests", self.max_waiting_requests, 1)
        _require_at_least("engine.max_tenant_requests", self.max_tenant_requests, 1)
        _require_at_least("engine.step_timeout_s", self.step_timeout_s, 1e-3)
        _require_at_most("engine.step_timeout_s", self.step_timeout_s, _YEAR_S)
        _require_at_least("engine.held_lease_ttl_s", self.held_lease_ttl_s, 0)
        _require_at_most("engine.held_lease_ttl_s", self.held_lease_ttl_s, _YEAR_S)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The gRPC server.

    Attributes:
        host: address to listen on.
        port: 0 picks a free one.
        metrics_port: where Prometheus metrics are served over HTTP, on the same host; 0 picks a free one. Without it,
            nowhere.
        drain_timeout_s: how long running requests may still take after SIGTERM.
        max_message_bytes: largest message accepted; 4 bytes a prompt token.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int | None = None
    drain_timeout_s: float = 30.0
    max_message_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        _require_port("server.port", self.port)
        if self.metrics_port is not None:
            _require_port("server.metrics_port", self.metrics_port)
        _require_at_least("server.drain_timeout_s", self.drain_timeout_s, 0)
        _require_at_most("server.drain_timeout_s", self.drain_timeout_s, _YEAR_S)
        _require_at_least("server.max_message_bytes", self.max_message_bytes, 1024)
        _require_at_most("server.max_message_bytes", self.max_message_bytes, _MAX_INT32)


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """What one tenant may hold, and its share of the steps; a section `tenants.NAME` for each that has any of it.

    Attributes:
        floor_tokens: cached tokens that no other tenant can evict; rounded up to whole blocks.
        ceiling_tokens: cached and leased tokens at most; rounded down to whole blocks. Without it, the whole pool.
        max_retained_tokens: tokens with a priority above the default at most; rounded down to whole blocks. Without it,
            what `cache.max_retained_share` leaves.
        weight: its share of the computed tokens while tenants compete, beside the others' weights of 1.
    """

    floor_tokens: int = 0
    ceiling_tokens: int | None = None
    max_retained_tokens: int | None = None
    weight: float = 1.0

    def require(self, path: str) -> None:
        """Refuse values out of range. Which tenant it is only the whole configuration knows, so that calls this.

        Args:
            path: `tenants.NAME`.

        Raises:
            ConfigError: the message names the key.
        """
        _require_at_least(f"{path}.floor_tokens", self.floor_tokens, 0)
        if self.ceiling_tokens is not None:
            _require_at_least(f"{path}.ceiling_tokens", self.ceiling_tokens, max(1, self.floor_tokens))
        if self.max_retained_tokens is not None:
            _require_at_least(f"{path}.max_retained_tokens", self.max_retained_tokens, 0)
        _require_at_least(f"{path}.weight", self.weight, 1e-3)
        _require_at_most(f"{path}.weight", self.weight, 1e3)


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration, a section for each owner."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, tenant in self.tenants.items():
            tenant.require(f"tenants.{name}")
        floors = sum(tenant.floor_tokens for tenant in self.tenants.values())
        if self.cache.capacity_tokens is not None and floors > self.cache.capacity_tokens:
            raise ConfigError(
                f"tenants.*.floor_tokens: expected at most cache.capacity_tokens {self.cache.capacity_tokens} in all, "
                f"got {floors}"
            )

    @classmethod
    def load(cls, file: str | Path | None = None, settings: Iterable[str] = ()) -> Config:
        """Read a TOML file, then apply `section.key=value` settings in order.

        Raises:
            ConfigError: the file can't be read, a key is unknown (the message names the nearest one), or a value has
                the wrong type or range.
        """
        config = cls()
        if file is not None:
            try:
                tree = tomllib.loads(Path(file).read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
                raise ConfigError(f"config file {file}: {error}") from error
            config = config._with(tree)
        for setting in settings:
            config = config._with(_parse_setting(setting))
        return config

    def _with(self, tree: Mapping[str, Any]) -> Config:
        sections: dict[str, Any] = {}
        for name, values in tree.items():
            _require_known(name, [f.name for f in dataclasses.fields(self)])
            if not isinstance(values, Mapping):
                raise ConfigError(f"{name}: expected a table of keys, got {values!r}")
            if name == "tenants":
                sections[name] = dict(self.tenants)
                for tenant, bounds in values.items():
                    before = self.tenants.get(tenant, TenantConfig())
                    sections[name][tenant] = _section_with(f"tenants.{tenant}", before, bounds)
            else:
                sections[name] = _section_with(name, getattr(self, name), values)
        return dataclasses.replace(self, **sections)


def _section_with(path: str, section: Any, values: Any) -> Any:
    """A section with some keys replaced; the values come from a file or a command line."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected a table of keys, got {values!r}")
    kinds = {f.name: f.type for f in dataclasses.fields(section)}
    for key, value in values.items():
        _require_known(f"{path}.{key}", [f"{path}.{known}" for known in kinds])
        _require_kind(f"{path}.{key}", value, str(kinds[key]))
    return dataclasses.replace(section, **values)


def _parse_setting(setting: str) -> dict[str, Any]:
    """A setting as a tree of tables; names with dots are quoted as in TOML: `tenants."example.com".weight=2`."""
    path, equals, text = setting.partition("=")
    keys = _KEY.findall(path.strip())
    if not equals or len(keys) < 2 or ".".join(keys) != path.strip():
        raise ConfigError(f"setting: expected section.key=value, got {setting!r}")
    try:
        tree: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        tree = text.strip()  # a bare word is a string
    for key in reversed(keys):
        tree = {key.strip('"'): tree}
    return cast("dict[str, Any]", tree)


def _require_known(path: str, known: list[str]) -> None:
    if path not in known:
        nearest = difflib.get_close_matches(path, known, n=1, cutoff=0.0)
        raise ConfigError(f"{path}: unknown key; the nearest is {nearest[0]}")


def _require_kind(path: str, value: object, kind: str) -> None:
    allowed: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "int": (int,),
        "int | None": (int,),
        "float": (float, int),
        "bool": (bool,),
    }
    if isinstance(value, bool) != (kind == "bool") or not isinstance(value, allowed[kind]):
        raise ConfigError(f"{path}: expected {kind}, got {value!r}")


def _require_one_of(path: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{path}: expected one of {', '.join(map(str, allowed))}, got {value}")


def _require_port(path: str, value: int) -> None:
    if not 0 <= value <= 65535:
        raise ConfigError(f"{path}: expected 0 to 65535, got {value}")


def _require_at_least(path: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{path}: expected at least {least}, got {value}")


def _require_at_most(path: str, value: float, most: float) -> None:
    if not value <= most:
        raise ConfigError(f"{path}: expected at most {most}, got {value}")
