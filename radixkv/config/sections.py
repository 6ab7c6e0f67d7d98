"""The sections of a configuration: their keys, defaults and bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from radixkv.config.bounds import OneOf, Range, require_fields
from radixkv.config.cache_section import CacheConfig
from radixkv.config.fleet_section import FleetConfig
from radixkv.config.model_section import AdapterConfig, ModelConfig
from radixkv.config.reading import laid_over, read_file, read_setting, require_known, section_with, table
from radixkv.config.tenant_section import TenantConfig
from radixkv.config.tiers_section import StoreConfig, TiersConfig
from radixkv.config.transfer_section import KVSourceConfig, TransferConfig
from radixkv.errors import ConfigError

_MAX_INT32 = 2**31 - 1
_YEAR_S = 366 * 24 * 3600  # clocks and time stamps overflow far beyond it

# Sections that have a name of their own below theirs.
_NAMED = {"adapters": AdapterConfig, "kv_sources": KVSourceConfig, "stores": StoreConfig, "tenants": TenantConfig}

_Count = Annotated[int, Range(0)]
_PositiveCount = Annotated[int, Range(1)]
_Port = Annotated[int, Range(0, 65535)]
_Seconds = Annotated[float, Range(0, _YEAR_S)]


# Launches of a step take the host 25 to 35 ms for a model of 8 billion parameters, by an estimate, whatever the tokens;
# 512 tokens take a GPU 15 ms of it, 2048 tokens 55 ms.
_STEP_TOKENS = {"cpu": 512, "cuda": 2048}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of requests and of the steps that compute them.

    Attributes:
        max_step_tokens: tokens that one forward pass computes at most; longer suffixes are split into chunks.
            Without it 512 on a CPU, 2048 on a GPU.
        max_running_requests: requests that may hold blocks at the same time.
        max_waiting_requests: unfinished requests beyond the running ones; more are refused with RESOURCE_EXHAUSTED.
        max_tenant_requests: unfinished requests of a single tenant.
        max_waiting_calls: calls that wait between two steps, Probe, Retain and Release; as many of admins. More are
            refused with RESOURCE_EXHAUSTED.
        max_tenant_calls: waiting calls of a single tenant.
        held_lease_ttl_s: seconds after which a held lease is released by itself, if it was not renewed.
        max_held_leases: leases that may be held; more are refused with RESOURCE_EXHAUSTED.
        max_tenant_held_leases: leases that a single tenant may hold.
        step_timeout_s: seconds after which a step hangs: all requests are cancelled, new ones refused until it ends.
        cuda_graphs: whether short steps are recorded at load, on a GPU, so that each is a single launch.
    """

    max_step_tokens: _PositiveCount | None = None
    max_running_requests: _PositiveCount = 64
    max_waiting_requests: _PositiveCount = 4096
    max_tenant_requests: _PositiveCount = 2048
    max_waiting_calls: _PositiveCount = 4096
    max_tenant_calls: _PositiveCount = 1024
    held_lease_ttl_s: _Seconds = 60.0
    max_held_leases: _Count = 4096
    max_tenant_held_leases: _Count = 1024
    step_timeout_s: Annotated[float, Range(1e-3, _YEAR_S)] = 300.0
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        require_fields("engine", self)

    @property
    def step_tokens(self) -> int:
        """Tokens that one forward pass computes at most, where nobody said on which device; see `on`."""
        return _STEP_TOKENS["cpu"] if self.max_step_tokens is None else self.max_step_tokens

    def on(self, device_type: str) -> EngineConfig:
        """Return the same limits with those that depend on the device, `cpu` or `cuda`."""
        step_tokens = _STEP_TOKENS[device_type] if self.max_step_tokens is None else self.max_step_tokens
        return dataclasses.replace(self, max_step_tokens=step_tokens)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The gRPC server.

    Attributes:
        host: address to listen on.
        port: 0 picks a free one.
        metrics_port: port of Prometheus metrics over HTTP, on the same host; 0 picks a free one. Without it there are
            none.
        drain_timeout_s: seconds that running requests may still take after SIGTERM.
        max_message_bytes: largest message accepted. Without it, what the longest prompt takes that the engine accepts:
            5 bytes a token, since each may come with a tag of its own, and half a MiB for all else.
        max_connections: open connections; more are closed at once.
        connection_idle_s: a connection without calls is closed after this time.
        max_connection_calls: calls under way on a connection; a client holds more of them back.
        max_calls: calls under way; more are refused to callers that have an equal share of them, and twice as many to
            all. Health watches have an eighth of it for themselves, and so have streams of events.
        max_receiving_bytes: messages that are being received, at their largest; more wait, connection by connection.
        receive_timeout_s: seconds that a message may take to come, and a call of reflection to end.
        max_held_bytes: requests of calls under way and answers that are not sent yet. What is beyond is refused to
            tenants that hold more than an equal share.
        send_timeout_s: seconds that a caller may leave an answer unread; then its connection is closed.
        default_deadline_s: deadline of a prompt that comes without one.
        max_deadline_s: latest deadline of a prompt; later ones are moved to it.
        tls_certificate: PEM file with the server's certificate chain; needs `tls_key`. Without it there is no TLS.
        tls_key: PEM file with its private key, without a password.
        client_ca: PEM file with the authorities of callers' certificates, which every caller then needs.
        tokens_file: TOML file that says who callers are. Without it, anyone may make every call.
        insecure: whether to listen beyond this machine without TLS or credentials, or to take tokens without TLS.
        admin_port: port of the calls of admins and readers, on the same host; 0 picks a free one. Without it they share
            `port`.
    """

    host: str = "127.0.0.1"
    port: _Port = 50051
    metrics_port: _Port | None = None
    drain_timeout_s: _Seconds = 30.0
    max_message_bytes: Annotated[int, Range(1024, _MAX_INT32)] | None = None
    max_connections: Annotated[int, Range(1, _MAX_INT32)] = 16_384
    connection_idle_s: Annotated[float, Range(1, 1e6)] = 600.0
    max_connection_calls: Annotated[int, Range(1, _MAX_INT32)] = 1024
    max_calls: Annotated[int, Range(1, _MAX_INT32)] = 8192
    max_receiving_bytes: _PositiveCount = 64 * 2**20
    receive_timeout_s: Annotated[float, Range(0.01, _YEAR_S)] = 10.0
    max_held_bytes: _PositiveCount = 256 * 2**20
    send_timeout_s: Annotated[float, Range(0.01, _YEAR_S)] = 60.0
    default_deadline_s: Annotated[float, Range(1e-3, _YEAR_S)] = 600.0
    max_deadline_s: Annotated[float, Range(1e-3, _YEAR_S)] = 3600.0
    tls_certificate: str | None = None
    tls_key: str | None = None
    client_ca: str | None = None
    tokens_file: str | None = None
    insecure: bool = False
    admin_port: _Port | None = None

    def __post_init__(self) -> None:
        require_fields("server", self)


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """The events of what is cached, and where they are published over ZMQ beside gRPC.

    Attributes:
        zmq_endpoint: address of a ZMQ PUB socket, such as `tcp://127.0.0.1:5557`. Without it there is none.
        replay_endpoint: address of a ZMQ ROUTER socket that sends batches again; needs `zmq_endpoint`.
        form: `array`, `map` or `plain_map`, of the events in a ZMQ message. Arrays have no field that isolates, so only
            what may be matched by tokens is published in them, and so it is in plain maps, for readers that refuse
            a message with that field.
        topic: first frame of each ZMQ message. Some routers read the server's name from it: `kv@SERVER@MODEL`.
        block_size: tokens of an event block, whatever blocks the pool has.
    """

    zmq_endpoint: str | None = None
    replay_endpoint: str | None = None
    form: Annotated[str, OneOf("array", "map", "plain_map")] = "array"
    topic: str = ""
    block_size: Annotated[int, Range(1, 1024)] = 16

    def __post_init__(self) -> None:
        require_fields("events", self)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The service for the SMG gateway, vLLM's engine protocol, on the server's port.

    Attributes:
        enabled: whether there is one.
        tenant: owner of all data of the gateway's requests. A gateway passes no tenants, salts or users.
        model_name: the model's name in the gateway's requests; the model's own by default.
    """

    enabled: bool = False
    tenant: str = ""
    model_name: str = ""

    def __post_init__(self) -> None:
        require_fields("gateway", self)


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Where spans of requests are sent. Metrics have a port of their own, `server.metrics_port`.

    Attributes:
        otlp_endpoint: URL of an OpenTelemetry collector. The protocol is gRPC, or HTTP for port 4318 or a URL with a
            path, unless `OTEL_EXPORTER_OTLP_PROTOCOL` names it. Without it no spans are exported.
    """

    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        require_fields("telemetry", self)


@dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration, a section for each owner.

    Attributes:
        stores: sections `stores.NAME`, by name.
        kv_sources: sections `kv_sources.NAME`, by name.
        adapters: sections `adapters.NAME`, by name.
        tenants: sections `tenants.NAME`, by name.
        default_tenant: the bounds of each tenant that has no section of its own.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    engine: EngineConfig = EngineConfig()
    server: ServerConfig = ServerConfig()
    events: EventsConfig = EventsConfig()
    gateway: GatewayConfig = GatewayConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    fleet: FleetConfig = field(default_factory=FleetConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    stores: Mapping[str, StoreConfig] = field(default_factory=dict)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    kv_sources: Mapping[str, KVSourceConfig] = field(default_factory=dict)
    adapters: Mapping[str, AdapterConfig] = field(default_factory=dict)
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict)
    default_tenant: TenantConfig = field(default_factory=TenantConfig)

    def __post_init__(self) -> None:
        for name, store in self.stores.items():
            store.require(f"stores.{name}")
        for name, source in self.kv_sources.items():
            source.require(f"kv_sources.{name}")
        for name, adapter in self.adapters.items():
            adapter.require(f"adapters.{name}")
        if 0 < self.model.max_adapters < len(self.adapters):
            raise ConfigError(
                f"model.max_adapters: expected at least the {len(self.adapters)} sections adapters.*, "
                f"got {self.model.max_adapters}"
            )
        self.default_tenant.require("default_tenant")
        if self.default_tenant.floor_tokens:
            raise ConfigError(
                "default_tenant.floor_tokens: expected 0, since any number of tenants may come, got "
                f"{self.default_tenant.floor_tokens}"
            )
        if self.default_tenant.weight != 1:
            raise ConfigError(
                "default_tenant.weight: expected 1, which the weights of other tenants are relative to, got "
                f"{self.default_tenant.weight}"
            )
        for name, tenant in self.tenants.items():
            tenant.require(f"tenants.{name}")
        floors = sum(tenant.floor_tokens for tenant in self.tenants.values())
        if self.cache.capacity_tokens is not None and floors > self.cache.capacity_tokens:
            raise ConfigError(
                f"tenants.*.floor_tokens: expected at most cache.capacity_tokens {self.cache.capacity_tokens} in all, "
                f"got {floors}"
            )

    @property
    def max_adapters(self) -> int:
        """Different adapters that may be loaded; 0 if adapters are off."""
        return self.model.max_adapters or len(self.adapters)

    @classmethod
    def load(cls, file: str | Path | None = None, settings: Iterable[str] = ()) -> Config:
        """Read a TOML file, and lay `section.key=value` settings over it; of equal keys the last one counts.

        What results is judged as a whole, so the order of different keys does not matter.

        Raises:
            ConfigError: the file can't be read, a key is unknown (the message names the nearest one), or a value has
                the wrong type or range.
        """
        trees = [] if file is None else [read_file(file)]
        trees += map(read_setting, settings)
        keys: dict[str, Any] = {}
        for tree in trees:
            _require_sections(tree)
            keys = laid_over(keys, tree)
        return cls._of(keys)

    @classmethod
    def _of(cls, tree: Mapping[str, Any]) -> Config:
        defaults = cls()
        sections: dict[str, Any] = {}
        for name, values in tree.items():
            if name in _NAMED:
                sections[name] = {
                    each: section_with(f"{name}.{each}", _NAMED[name](), keys) for each, keys in values.items()
                }
            else:
                sections[name] = section_with(name, getattr(defaults, name), values)
        return cls(**sections)


def _require_sections(tree: Mapping[str, Any]) -> None:
    """Refuse sections that are unknown or no tables, also where those of another tree will replace them."""
    for name, values in tree.items():
        require_known(name, [each.name for each in dataclasses.fields(Config)])
        for each, keys in table(name, values).items():
            if name in _NAMED:
                table(f"{name}.{each}", keys)
