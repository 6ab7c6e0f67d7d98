"""Configuration: frozen dataclasses, read from TOML and then from `section.key=value` settings.

Face: `Config`, `ModelConfig`, `CacheConfig`, `EngineConfig`, `ServerConfig`, `EventsConfig`, `GatewayConfig`,
`AdapterConfig`, `StoreConfig`, `TenantConfig`, `TiersConfig`.
"""

from radixkv.config.cache_section import EVICTION_POLICIES, KV_DTYPES, MAX_BLOCKS, CacheConfig
from radixkv.config.model_section import AdapterConfig, ModelConfig
from radixkv.config.sections import (
    Config,
    EngineConfig,
    EventsConfig,
    GatewayConfig,
    ServerConfig,
)
from radixkv.config.tenant_section import TenantConfig
from radixkv.config.tiers_section import StoreConfig, TiersConfig

__all__ = [
    "EVICTION_POLICIES",
    "KV_DTYPES",
    "MAX_BLOCKS",
    "AdapterConfig",
    "CacheConfig",
    "Config",
    "EngineConfig",
    "EventsConfig",
    "GatewayConfig",
    "ModelConfig",
    "ServerConfig",
    "StoreConfig",
    "TenantConfig",
    "TiersConfig",
]
