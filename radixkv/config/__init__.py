"""Configuration: frozen dataclasses, read from TOML and then from `section.key=value` settings.

Face: `Config`, `ModelConfig`, `CacheConfig`, `EngineConfig`, `ServerConfig`, `EventsConfig`, `GatewayConfig`,
`FleetConfig`, `AdapterConfig`, `KVSourceConfig`, `StoreConfig`, `TelemetryConfig`, `TenantConfig`, `TiersConfig`,
`TransferConfig`.
"""

from radixkv.config.cache_section import EVICTION_POLICIES, KV_DTYPES, MAX_BLOCKS, CacheConfig
from radixkv.config.fleet_section import FleetConfig
from radixkv.config.model_section import AdapterConfig, ModelConfig
from radixkv.config.sections import (
    Config,
    EngineConfig,
    EventsConfig,
    GatewayConfig,
    ServerConfig,
    TelemetryConfig,
)
from radixkv.config.tenant_section import TenantConfig
from radixkv.config.tiers_section import StoreConfig, TiersConfig
from radixkv.config.transfer_section import KVSourceConfig, TransferConfig

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
