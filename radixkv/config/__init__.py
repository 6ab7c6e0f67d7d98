"""Configuration: frozen dataclasses, loaded from a TOML file and `section.key=value` settings.

Public API: `Config`, `ModelConfig`, `CacheConfig`, `EngineConfig`, `ServerConfig`, `EventsConfig`, `GatewayConfig`,
`FleetConfig`, `AdapterConfig`, `KVSourceConfig`, `StoreConfig`, `TelemetryConfig`, `TenantConfig`, `TiersConfig`,
`TransferConfig`.
"""

from radixkv.config.config import Config
from radixkv.config.sections import (
    EVICTION_POLICIES,
    KV_DTYPES,
    MAX_BLOCKS,
    STATE_SHARE,
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

__all__ = [
    "EVICTION_POLICIES",
    "KV_DTYPES",
    "MAX_BLOCKS",
    "STATE_SHARE",
    "AdapterConfig",
    "CacheConfig",
    "Config",
    "EngineConfig",
    "EventsConfig",
    "FleetConfig",
    "GatewayConfig",
    "KVSourceConfig",
    "ModelConfig",
    "ServerConfig",
    "StoreConfig",
    "TelemetryConfig",
    "TenantConfig",
    "TiersConfig",
    "TransferConfig",
]
