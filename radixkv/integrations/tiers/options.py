"""The options of the tiers, as an engine passes them: a JSON object with the keys of section `tiers`, and quotas."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radixkv.config import TiersConfig
from radixkv.config.config import require_known
from radixkv.errors import ConfigError
from radixkv.offload.index.tier_index import TierShares
from radixkv.startup.tier_secrets import has_protection

# The keys of section `tiers` that apply here. Mooncake is not tested with other engines.
_TIER_KEYS = ("host_bytes", "disk_path", "disk_bytes", "redis_url", "secret_file", "encryption_key_file", "trusted")
_SHARE_KEYS = ("floor", "ceiling")


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Options of a `ByteStore`.

    Attributes:
        tiers: the stores, and the secrets that protect them. In `disk_path`, `~` is expanded.
        tenants: shares of host memory and of the disk by tenant: `floor`, the fraction that other tenants cannot evict,
            and `ceiling`, the fraction that the tenant cannot exceed.
        other_tenants: shares of each tenant that is not in `tenants`.
        model_id: identifies the weights of the model; empty for a digest of the files of the model, if the engine names
            these files.
        load_limit_s: time limit of a read in seconds; a read that takes longer is a miss.
        max_waiting_bytes: maximum size of the values that wait to be written, in bytes; further values are not saved.
    """

    tiers: TiersConfig
    tenants: Mapping[str, TierShares] = field(default_factory=dict)
    other_tenants: TierShares = field(default_factory=TierShares)
    model_id: str = ""
    load_limit_s: float = 5.0
    max_waiting_bytes: int = 256 << 20

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> TierOptions:
        """Parse and validate options.

        Args:
            values: `host_bytes`, `disk_path`, `disk_bytes`, `redis_url`, `secret_file`, `encryption_key_file` and
                `trusted` of section `tiers`; `tenants`, a table of shares by tenant; and the other attributes.

        Raises:
            ConfigError: a key is unknown, a value is invalid, no store is named, or Redis is neither authenticated nor
                declared trusted.
        """
        own_keys = [each.name for each in dataclasses.fields(cls) if each.name != "tiers"]
        options = dict(values)
        for key in options:
            require_known(key, (*_TIER_KEYS, *own_keys))
        tiers = TiersConfig(**{key: options.pop(key) for key in _TIER_KEYS if key in options})
        if not (tiers.host_bytes or tiers.disk_path or tiers.redis_url):
            raise ConfigError("tiers: expected host_bytes, disk_path or redis_url, got none of them")
        if tiers.redis_url and not (tiers.trusted or has_protection(tiers)):
            raise ConfigError(
                "redis_url: expected secret_file or encryption_key_file, so that modified blocks are not used; set "
                "one, or set trusted if no one else can modify the store"
            )
        if tiers.disk_path is not None:
            tiers = dataclasses.replace(tiers, disk_path=str(Path(tiers.disk_path).expanduser()))
        if "tenants" in options:
            options["tenants"] = {
                name: _shares_of(f"tenants.{name}", shares) for name, shares in _table("tenants", options["tenants"])
            }
        if "other_tenants" in options:
            options["other_tenants"] = _shares_of("other_tenants", options["other_tenants"])
        _require_types(options)
        return cls(tiers, **options)

    def shares_of(self, tenant: str) -> TierShares:
        """Return the shares of a tenant."""
        return self.tenants.get(tenant, self.other_tenants)


def _table(path: str, values: object) -> list[tuple[str, Any]]:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: expected an object, got {values!r}")
    return list(values.items())


def _shares_of(path: str, values: object) -> TierShares:
    shares = dict(_table(path, values))
    for key, value in shares.items():
        require_known(f"{path}.{key}", [f"{path}.{each}" for each in _SHARE_KEYS])
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ConfigError(f"{path}.{key}: expected a fraction from 0 to 1, got {value!r}")
    return TierShares(**shares)


def _require_types(values: Mapping[str, Any]) -> None:
    if not isinstance(values.get("model_id", ""), str):
        raise ConfigError(f"model_id: expected a string, got {values['model_id']!r}")
    for key in ("load_limit_s", "max_waiting_bytes"):
        value = values.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{key}: expected a number above 0, got {value!r}")
