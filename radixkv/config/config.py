"""The whole configuration, loaded from a TOML file and `section.key=value` settings."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from radixkv.config.sections import (
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    EventsConfig,
    FleetConfig,
    GatewayConfig,
    KVSourceConfig,
    ModelConfig,
    ServerConfig,
    StoreConfig,
    TelemetryConfig,
    TenantConfig,
    TiersConfig,
    TransferConfig,
)
from radixkv.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

# Classes of the sections that have a name, such as `tenants.acme`.
_NAMED_SECTIONS = {
    "adapters": AdapterConfig,
    "kv_sources": KVSourceConfig,
    "stores": StoreConfig,
    "tenants": TenantConfig,
}

# A name in a path: quoted, or without dots.
_KEY = re.compile(r'"[^"]+"|[^".]+')
_Section = TypeVar("_Section", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration.

    Attributes:
        stores: sections `stores.NAME`, by name.
        kv_sources: sections `kv_sources.NAME`, by name.
        adapters: sections `adapters.NAME`, by name.
        tenants: sections `tenants.NAME`, by name.
        default_tenant: quotas of every tenant without a section of its own.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    events: EventsConfig = field(default_factory=EventsConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    stores: Mapping[str, StoreConfig] = field(default_factory=dict)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    kv_sources: Mapping[str, KVSourceConfig] = field(default_factory=dict)
    adapters: Mapping[str, AdapterConfig] = field(default_factory=dict)
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    default_tenant: TenantConfig = field(default_factory=TenantConfig)

    def __post_init__(self) -> None:
        for group in _NAMED_SECTIONS:
            for name, section in getattr(self, group).items():
                section.require(f"{group}.{name}")
        if 0 < self.model.max_adapters < len(self.adapters):
            raise ConfigError(
                f"model.max_adapters: expected at least {len(self.adapters)}, the number of sections adapters.*, "
                f"got {self.model.max_adapters}"
            )
        self.default_tenant.require("default_tenant")
        if self.default_tenant.floor_tokens:
            raise ConfigError(
                "default_tenant.floor_tokens: expected 0, since the number of tenants is unbounded, got "
                f"{self.default_tenant.floor_tokens}"
            )
        if self.default_tenant.weight != 1:
            raise ConfigError(
                "default_tenant.weight: expected 1, since all other weights are relative to it, got "
                f"{self.default_tenant.weight}"
            )
        floors = sum(tenant.floor_tokens for tenant in self.tenants.values())
        capacity = self.cache.capacity_tokens
        if capacity is not None and floors > capacity:
            raise ConfigError(
                f"tenants.*.floor_tokens: expected a total of at most cache.capacity_tokens, {capacity}, got {floors}"
            )

    @property
    def max_adapters(self) -> int:
        """Maximum number of different adapters that are loaded; 0 if adapters are disabled."""
        return self.model.max_adapters or len(self.adapters)

    @classmethod
    def load(cls, file: str | Path | None = None, settings: Iterable[str] = ()) -> Config:
        """Read a TOML file and apply `section.key=value` settings to it; the last value of a key wins.

        The file and each setting are validated on their own only as to the names of sections. Keys and values are
        validated in the result, so the order of different keys does not matter.

        Args:
            file: path of the TOML file, if there is one.
            settings: the values of `--set`.

        Raises:
            ConfigError: the file cannot be read, a setting has another form, a key is unknown (the message names the
                nearest one), or a value has the wrong type or is out of range.
        """
        trees = [] if file is None else [_read_file(file)]
        trees += map(read_setting, settings)
        merged: dict[str, Any] = {}
        for tree in trees:
            _require_sections(tree)
            merged = _merge(merged, tree)
        return cls._from_tables(merged)

    @classmethod
    def _from_tables(cls, tree: Mapping[str, Any]) -> Config:
        defaults = cls()
        sections: dict[str, Any] = {}
        for group, table in tree.items():
            if group in _NAMED_SECTIONS:
                default = _NAMED_SECTIONS[group]()
                sections[group] = {
                    name: _replace_keys(f"{group}.{name}", default, keys) for name, keys in table.items()
                }
            else:
                sections[group] = _replace_keys(group, getattr(defaults, group), table)
        return cls(**sections)


def _read_file(file: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {file}: expected UTF-8, got other bytes") from error
    except (ValueError, RecursionError) as error:  # tomllib raises its own errors and those of int()
        raise ConfigError(f"config file {file}: {error}") from error


def read_setting(setting: str) -> dict[str, Any]:
    """Parse a setting into nested tables. A name that contains dots is quoted, as in TOML.

    >>> read_setting('tenants."example.com".weight=2')
    {'tenants': {'example.com': {'weight': 2}}}

    Raises:
        ConfigError: the section, the key or the equals sign is missing. An empty value is an empty string.
    """
    path, equals, text = setting.partition("=")
    keys = _KEY.findall(path.strip())
    if not equals or len(keys) < 2 or ".".join(keys) != path.strip():
        raise ConfigError(f"setting: expected section.key=value, got {setting!r}")
    try:
        tree: Any = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        tree = text.strip()  # a bare word is a string
    for key in reversed(keys):
        tree = {key.strip('"'): tree}
    return cast("dict[str, Any]", tree)


def _require_table(path: str, values: object) -> Mapping[str, Any]:
    """Return `values`; raise `ConfigError` unless they are a table."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected a table of keys, got {values!r}")
    return values


def _merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees of tables. If both have a key, `upper` wins, unless both values are tables: these are merged."""
    merged_tables = {
        key: _merge(lower[key], value)
        for key, value in upper.items()
        if isinstance(value, Mapping) and isinstance(lower.get(key), Mapping)
    }
    return {**lower, **upper, **merged_tables}


def require_known(path: str, known: Iterable[str]) -> None:
    """Raise `ConfigError` unless `path` is one of the known paths. The message names the nearest known path."""
    paths = list(known)
    if path not in paths:
        nearest = difflib.get_close_matches(path, paths, n=1, cutoff=0.0)
        raise ConfigError(f"{path}: unknown key; the nearest is {nearest[0]}")


def _replace_keys(path: str, section: _Section, values: object) -> _Section:
    """Return a copy of a section with some keys replaced. The copy validates types and bounds itself."""
    replaced = _require_table(path, values)
    known_paths = [f"{path}.{field.name}" for field in dataclasses.fields(section)]
    for key in replaced:
        require_known(f"{path}.{key}", known_paths)
    return dataclasses.replace(section, **replaced)


def _require_sections(tree: Mapping[str, Any]) -> None:
    """Refuse sections that are unknown or not tables, even if a later setting replaces them."""
    known_groups = [field.name for field in dataclasses.fields(Config)]
    for group, table in tree.items():
        require_known(group, known_groups)
        for name, keys in _require_table(group, table).items():
            if group in _NAMED_SECTIONS:
                _require_table(f"{group}.{name}", keys)
