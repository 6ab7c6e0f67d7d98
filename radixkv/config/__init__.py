"""Configuration: frozen dataclasses, loaded from a TOML file and `section.key=value` settings.

Public API: `Config`, `ModelConfig`, `CacheConfig`, `EngineConfig`, `ServerConfig`, `EventsConfig`, `GatewayConfig`,
`FleetConfig`, `AdapterConfig`, `KVSourceConfig`, `StoreConfig`, `TelemetryConfig`, `TenantConfig`, `TiersConfig`,
`TransferConfig`, and constants of these sections.
"""

from radixkv.config.config import Config
from radixkv.config.sections import (
    EVICTION_POLICIES,
    KV_DTYPES,
    MAX_BLOCKS,
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
