"""The sections of the configuration: one frozen dataclass each, with the keys, their defaults and their bounds.

`docs/deploy/radixkv.toml` is generated from the docstrings here: `python -m tests.config.example_file`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated

from radixkv.config.address import host_and_port
from radixkv.config.bounds import OneOf, Range, require_fields
from radixkv.errors import ConfigError

KV_DTYPES = ("auto", "bf16", "fp8", "int8", "k8v4")
EVICTION_POLICIES = ("adaptive", "lru", "slru", "lfu", "priority")
TOOL_FORMATS = (
    "deepseek_v3",
    "deepseek_v31",
    "functiongemma",
    "functools",
    "gemma4",
    "glm4",
    "hermes",
    "kimi_k2",
    "lfm2",
    "llama3_json",
    "mistral",
    "mistral_args",
    "nemotron",
    "phi4_mini",
    "pythonic",
    "qwen3_coder",
    "seed_oss",
)
REASONING_FORMATS = ("cohere", "gemma4", "mistral", "seed_oss", "think")
MAX_BLOCKS = 2**31 - 1  # block ids are int32
STATE_SHARE = 0.1  # memory for state snapshots without `cache.state_bytes`, as a fraction of the memory of K and V

_DEFAULT_CAPACITY_TOKENS = 131_072
_MAX_INT32 = 2**31 - 1
_YEAR_S = 366 * 24 * 3600  # the maximum of times: much longer ones overflow clocks and timestamps

_Count = Annotated[int, Range(0)]
_PositiveCount = Annotated[int, Range(1)]
_Bytes = Annotated[int, Range(1, 2**63 - 1)]
_Share = Annotated[float, Range(0, 1)]
_Port = Annotated[int, Range(0, 65535)]
_Seconds = Annotated[float, Range(0, _YEAR_S)]
_Rate = Annotated[float, Range(1e-3, 1e12)]
_Replicas = Annotated[int, Range(1, 999_999)]

# Launching a step costs the host an estimated 25 to 35 ms for a model of 8 billion parameters, whatever the number of
# tokens. A GPU computes 512 tokens in 15 ms and 2048 tokens in 55 ms.
_STEP_TOKENS = {"cpu": 512, "cuda": 2048}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model to serve, its device, and its LoRA adapters.

    Attributes:
        path: `tiny` for the embedded model, a directory with config.json and safetensors files, a GGUF file, or
            `ORG/NAME` or `ORG/NAME@REVISION` of a model in the local cache of Hugging Face.
        device: `auto`, `cpu` or `cuda`. `auto` uses a CUDA device if there is one.
        dtype: data type of weights and activations: `auto` (the checkpoint's), `float32`, `bfloat16` or `float16`.
        exactness: `exact`: a cache hit never changes a bit of the output. `fast`: the last bits of the output may
            depend on the batch and on what is cached.
        weights: format of the weights of linear layers: `auto` (as `dtype` says), or on a CPU only: `q8` or `q4`,
            weights of 8 or 4 bits with a scale for each 32 input features (`q4` also stores a minimum, and uses `q8`
            for the output layer); or `int8`, 8-bit weights with one scale per output feature, and 8-bit activations
            with one scale per token. Embeddings, norms and experts keep their data type.
        longrope: RoPE factors of models with longrope, such as Phi-3. `short`: the factors for short sequences;
            sequences longer than `original_max_position_embeddings` are refused. `long`: the factors for long sequences
            at all positions, for sequences of up to `max_position_embeddings`; answers to short prompts may be worse.
            Blocks that were stored with one setting are not used with the other.
        threads: number of CPU threads that compute. Default: `OMP_NUM_THREADS` if it is set, otherwise one per physical
            core within the CPU affinity and the cgroup quota.
        max_adapters: maximum number of different LoRA adapters that are loaded; as many again may be draining. 0
            disables adapters, unless there are sections `adapters.NAME`: then the number of sections is the maximum.
        adapter_bytes: device memory for adapter weights, in bytes. The most recently used adapters are kept there, the
            others in host memory.
        adapter_directory: directory below which `LoadAdapter` may load adapters. Empty: it may load none.
    """

    path: str = "tiny"
    device: Annotated[str, OneOf("auto", "cpu", "cuda")] = "auto"
    dtype: Annotated[str, OneOf("auto", "float32", "bfloat16", "float16")] = "auto"
    exactness: Annotated[str, OneOf("exact", "fast")] = "exact"
    weights: Annotated[str, OneOf("auto", "q8", "q4", "int8")] = "auto"
    longrope: Annotated[str, OneOf("short", "long")] = "short"
    threads: Annotated[int, Range(1, 8192)] | None = None
    max_adapters: Annotated[int, Range(0, 4096)] = 0
    adapter_bytes: Annotated[int, Range(1)] = 2**30
    adapter_directory: str = ""

    def __post_init__(self) -> None:
        require_fields("model", self)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """A LoRA adapter that is loaded at startup, from a section `adapters.NAME`.

    Attributes:
        path: directory with adapter_config.json and adapter_model.safetensors, as PEFT writes it.
    """

    path: str = ""

    def require(self, path: str) -> None:
        """Check all values and the name. `Config` calls this, since only it knows the name of the section.

        Args:
            path: path of the section, such as `adapters.NAME`.

        Raises:
            ConfigError: a value or the name is refused. The message names the key.
        """
        require_fields(path, self)
        if path == "adapters.":
            raise ConfigError("adapters: each section needs a name; the empty name is the base model")
        if not self.path:
            raise ConfigError(f"{path}.path: a directory is required")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The pool of K/V blocks, and the rules for what stays cached in it.

    Attributes:
        block_size: tokens per block: 16, 32 or 64.
        capacity_tokens: capacity of the pool in tokens, rounded down to whole blocks. If layers with sliding-window
            attention store fewer tokens, the pool takes the same memory and the other layers store more. Default: on a
            GPU, as many as `memory_share` allows; on a CPU, 131,072, or fewer if these would take more than 1 GiB and
            more than twice the memory of the weights, or more than half of the available memory.
        windowed_tokens: capacity, in tokens, of the separate pool for layers with sliding-window attention, on a CPU;
            rounded down to whole blocks. 0: these layers store every token, like the others. Default: these layers
            share the memory of the others as the traffic needs. They store every token on a GPU, and also on a CPU if
            another feature requires it or if a request could need the whole pool.
        memory_share: fraction of a GPU's memory that weights, activations, the pool and other processes may use
            together, 0 to 1.
        kv_dtype: storage format of K and V: `auto` (the model's data type), `bf16`, `fp8`, `int8` or `k8v4` (keys in
            int8, values in int4). The last three store one scale per token and head.
        evicted_prefixes: number of evicted prefixes to remember, so that later misses can be explained.
        policy: eviction policy for unused blocks: `adaptive`, `lru`, `slru`, `lfu` or `priority`.
        max_retained_share: maximum fraction of the pool with a retention priority above the default, 0 to 1.
        max_held_share: maximum fraction of the pool that held leases may keep, 0 to 1.
        max_public_share: maximum fraction of the pool for public prefixes, 0 to 1. 0 disables public prefixes.
        probation_share: fraction of the pool, 0 to 1, for prompts that were used only once; what exceeds it is evicted
            before anything that was reused. 1: the policy alone decides.
        state_bytes: memory for state snapshots of recurrent models, in bytes, in addition to the states of running
            requests. Default: a tenth of the memory of K and V, and at least 64 snapshots.
        state_every_tokens: number of tokens between the state snapshots of a long prompt; rounded down to whole blocks,
            at least one.
    """

    block_size: Annotated[int, OneOf(16, 32, 64)] = 64
    capacity_tokens: int | None = None
    windowed_tokens: _Count | None = None
    memory_share: _Share = 0.9
    kv_dtype: Annotated[str, OneOf(*KV_DTYPES)] = "auto"
    evicted_prefixes: _Count = 65_536
    policy: Annotated[str, OneOf(*EVICTION_POLICIES)] = "adaptive"
    max_retained_share: _Share = 0.2
    max_held_share: _Share = 0.5
    max_public_share: _Share = 0.25
    probation_share: _Share = 0.5
    state_bytes: Annotated[int, Range(0, 2**63 - 1)] | None = None
    state_every_tokens: Annotated[int, Range(1)] = 512

    def __post_init__(self) -> None:
        if self.kv_dtype == "int4":
            raise ConfigError(
                "cache.kv_dtype: expected auto, bf16, fp8, int8 or k8v4, got int4, which is not offered, because keys "
                "of 4 bits change answers too much (perplexity +9 %): k8v4 has keys of 8 bits and values of 4"
            )
        require_fields("cache", self)
        if self.capacity_tokens is not None:
            Range(self.block_size, MAX_BLOCKS * self.block_size).require("cache.capacity_tokens", self.capacity_tokens)

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool, if its size does not depend on the device's memory."""
        capacity_tokens = _DEFAULT_CAPACITY_TOKENS if self.capacity_tokens is None else self.capacity_tokens
        return capacity_tokens // self.block_size


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits of requests, and of the forward passes (steps) that compute them.

    Attributes:
        max_step_tokens: maximum number of tokens per step; longer prompts are prefilled in chunks. Default: 512 on a
            CPU, 2048 on a GPU.
        max_running_requests: maximum number of running requests, which are those that hold blocks.
        max_waiting_requests: maximum number of unfinished requests in addition to `max_running_requests`; further
            requests are refused with RESOURCE_EXHAUSTED.
        max_tenant_requests: maximum number of unfinished requests per tenant.
        max_waiting_calls: maximum number of calls other than Prefill and Generate, such as Probe, Retain and Release,
            that wait for a step to end. A limit of the same size applies to the calls of administrators. Further calls
            are refused with RESOURCE_EXHAUSTED.
        max_tenant_calls: maximum number of these calls per tenant.
        held_lease_ttl_s: seconds after which a held lease expires if it is not renewed.
        max_held_leases: maximum number of held leases; further ones are refused with RESOURCE_EXHAUSTED.
        max_tenant_held_leases: maximum number of held leases per tenant.
        step_timeout_s: seconds after which a step counts as stalled: all requests are cancelled, and new ones refused
            until the step ends.
        cuda_graphs: whether to capture short steps as CUDA graphs at startup, so that each is a single launch; GPU
            only.
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
        """Maximum number of tokens per step, as on a CPU unless `max_step_tokens` is set; see `on`."""
        return _STEP_TOKENS["cpu"] if self.max_step_tokens is None else self.max_step_tokens

    def on(self, device_type: str) -> EngineConfig:
        """Return a copy in which the limits that depend on the device, `cpu` or `cuda`, are set."""
        step_tokens = _STEP_TOKENS[device_type] if self.max_step_tokens is None else self.max_step_tokens
        return dataclasses.replace(self, max_step_tokens=step_tokens)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The gRPC server.

    Attributes:
        host: address to listen on.
        port: port to listen on. 0 picks a free one.
        metrics_port: HTTP port for Prometheus metrics, on the same host. 0 picks a free one. Default: no metrics port.
        http_port: port for the APIs of OpenAI and Anthropic over HTTP, on the same host. 0 picks a free one. Default:
            no HTTP API.
        tool_format: format in which the model writes tool calls, for the HTTP APIs. `auto` recognizes it by the
            chat template, and `none` refuses tools.
        reasoning_format: format in which the model writes its reasoning, for the HTTP APIs. `auto` recognizes it by the
            chat template, and `none` leaves the reasoning in the text.
        metrics_hosts: further host names under which clients reach the metrics port and the HTTP port, separated by
            commas, such as those that a proxy passes on. If `host` is a loopback address, requests to these ports that
            name any other host than this machine or one of these names are refused. Otherwise they are refused only if
            this key is set, and requests that name an IP address are accepted.
        drain_timeout_s: seconds that running requests may take after SIGTERM.
        max_message_bytes: maximum size of a request message. Default: enough for the longest prompt that the engine
            accepts: 5 bytes per token, since each may be encoded with a tag of its own, and 512 KiB for the rest.
        max_connections: maximum number of open connections to each port except the metrics port, or fewer if the system
            allows fewer open files. The gRPC ports close further connections immediately. The HTTP port instead closes
            the connection that was idle for longest, if any is idle.
        connection_idle_s: seconds after which a connection without calls is closed.
        max_connection_calls: maximum number of concurrent calls per connection; clients queue further ones.
        max_calls: maximum number of concurrent calls. Beyond it, callers that already have an equal share of them are
            refused; at twice the number, all callers are refused. Health watches have a limit of their own, an eighth
            of this number; event streams and reflection calls together have another one of the same size.
        max_receiving_bytes: memory for messages that are being received, in bytes. Each message counts as
            `max_message_bytes`, and at least four are received at a time. Further messages wait, and connections take
            turns.
        receive_timeout_s: seconds within which a message must arrive, and a reflection call must end.
        max_held_bytes: memory for the requests of concurrent calls and for unsent responses, in bytes. Beyond it,
            tenants that hold more than an equal share are refused.
        send_timeout_s: seconds that a client may leave a response unread before its connection is closed.
        default_deadline_s: deadline of Prefill and Generate calls that have none, in seconds.
        max_deadline_s: maximum deadline of these calls, in seconds; later deadlines are shortened to it.
        tls_certificate: PEM file with the server's certificate chain; requires `tls_key`. Default: no TLS.
        tls_key: PEM file with the private key, without a password.
        client_ca: PEM file with the certificate authorities of clients; requires `tls_certificate`, `tokens_file` and
            the package cryptography, which the extra `engine` includes. Every client of the gRPC ports then needs a
            certificate (mTLS).
        tokens_file: TOML file that maps bearer tokens and client certificates to tenants and roles. Default: every
            caller may make every call.
        insecure: whether to allow listening on a non-loopback address without TLS or authentication, and bearer tokens
            without TLS.
        admin_port: separate port for calls of administrators and readers, on the same host. 0 picks a free one.
            Default: they use `port`.
        record_path: directory in which the traffic is recorded as a trace for `radixkv simulate`, with keyed hashes in
            place of tokens and names. Default: no recording.
        record_bytes: maximum size of the recorded files together; the oldest are deleted.
        statement_path: directory in which the server saves what each tenant uses, for `radixkv statement`. Each server
            needs its own; replicas of a fleet use subdirectories. Default: no statements.
        statement_interval_s: seconds between two saves. If the process is killed, what was used since the last save is
            lost.
        diagnosed_share: CPU time that the server may use to find the causes of misses for `radixkv doctor`, as a share
            of the time of prefills. 0 disables this.
    """

    host: str = "127.0.0.1"
    port: _Port = 50051
    metrics_port: _Port | None = None
    http_port: _Port | None = None
    tool_format: Annotated[str, OneOf("auto", "none", *TOOL_FORMATS)] = "auto"
    reasoning_format: Annotated[str, OneOf("auto", "none", *REASONING_FORMATS)] = "auto"
    metrics_hosts: str = ""
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
    record_path: str | None = None
    record_bytes: Annotated[int, Range(2**20, 2**40)] = 2**30
    statement_path: str | None = None
    statement_interval_s: Annotated[float, Range(1, 86_400)] = 60.0
    diagnosed_share: Annotated[float, Range(0, 0.5)] = 0.02

    def __post_init__(self) -> None:
        require_fields("server", self)


@dataclass(frozen=True, slots=True)
class EventsConfig:
    """K/V cache events for routers. They are streamed over gRPC, and published over ZMQ if an endpoint is set.

    Attributes:
        zmq_endpoint: address of the ZMQ PUB socket, such as `tcp://127.0.0.1:5557`. Default: no ZMQ.
        replay_endpoint: address of the ZMQ ROUTER socket from which readers request missed batches again; requires
            `zmq_endpoint`.
        curve_key_file: file with the secret key of both sockets, as `zmq.auth.create_certificates` writes it; requires
            `curve_clients`. Peers must then authenticate themselves with CURVE. Default: everyone who can connect may
            read, so addresses must be of this machine unless `server.insecure` is set.
        curve_clients: directory with a file NAME.key for each peer that may connect, with its public key.
        form: encoding of an event in a ZMQ message: `array`, or `map`, also called `plain_map`. Messages contain only
            blocks that may be matched by their tokens alone: those of `gateway.tenant` without an adapter and a salt.
        topic: first frame of each ZMQ message. Some routers read the server's name from it: `kv@SERVER@MODEL`.
        block_size: tokens per event block, independent of the block size of the pool.
        buffer_steps: number of steps whose events are kept for readers that fall behind or connect again; fewer steps
            if these events have more than 500,000 blocks.
    """

    zmq_endpoint: str | None = None
    replay_endpoint: str | None = None
    curve_key_file: str | None = None
    curve_clients: str | None = None
    form: Annotated[str, OneOf("array", "map", "plain_map")] = "array"
    topic: str = ""
    block_size: Annotated[int, Range(1, 1024)] = 16
    buffer_steps: Annotated[int, Range(1, 1_000_000)] = 10_000

    def __post_init__(self) -> None:
        require_fields("events", self)


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The service for the SMG gateway: vLLM's gRPC engine protocol, on the server's port.

    Attributes:
        enabled: whether the service is available.
        tenant: tenant of all requests of the gateway, which does not transmit tenants, salts or users.
        model_name: name of the model in the gateway's requests. Empty: the model's own name.
    """

    enabled: bool = False
    tenant: str = ""
    model_name: str = ""

    def __post_init__(self) -> None:
        require_fields("gateway", self)


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Export of OpenTelemetry spans. Prometheus metrics have a port of their own, `server.metrics_port`.

    Attributes:
        otlp_endpoint: URL of an OpenTelemetry collector. The protocol is gRPC, or HTTP if the port is 4318 or the URL
            has a path; `OTEL_EXPORTER_OTLP_PROTOCOL` overrides it. Default: no spans are exported.
    """

    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        require_fields("telemetry", self)


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """A fleet of replicas on Ray, as `radixkv fleet` starts it. A single server ignores this section.

    Attributes:
        routing: routing policy: `prefix`, which weighs cached tokens against load, or, for comparison,
            `longest-prefix`, `least-loaded` or `round-robin`.
        least_match_tokens: minimum number of cached tokens for which a replica is preferred.
        health_timeout_s: seconds without an answer to a health check after which calls to a replica are abandoned; they
            are retried on another replica if they have not been answered in part.
        start_timeout_s: seconds that a request waits while no replica is available.
        calls_per_replica: target number of concurrent calls per replica when the fleet scales with its load.
        grow_after_s: seconds for which the load must require more replicas before some are added.
        shrink_after_s: seconds for which fewer replicas must suffice before some are drained and removed.
        prefill_replicas: number of replicas that only prefill; the decode replicas generate from their K/V. Default:
            every replica does both.
        decode_replicas: number of decode replicas; required with `prefill_replicas`.
        tls_ca: PEM file with the certificate authorities of the replicas. Replicas then use the TLS files of section
            `server`, at the same paths on each machine. Default: no TLS.
        tls_name: name in the replicas' certificates. Empty: the address of each replica.
    """

    routing: Annotated[str, OneOf("prefix", "longest-prefix", "least-loaded", "round-robin")] = "prefix"
    least_match_tokens: Annotated[int, Range(0, _MAX_INT32)] = 1024
    health_timeout_s: Annotated[float, Range(0.1, 600)] = 3.0
    start_timeout_s: _Seconds = 30.0
    calls_per_replica: Annotated[float, Range(0.01, 1e6)] = 8.0
    grow_after_s: _Seconds = 30.0
    shrink_after_s: _Seconds = 600.0
    prefill_replicas: _Replicas | None = None
    decode_replicas: _Replicas | None = None
    tls_ca: str | None = None
    tls_name: str = ""

    def __post_init__(self) -> None:
        require_fields("fleet", self)

    @property
    def has_roles(self) -> bool:
        """Whether prefill and decode run on different replicas.

        Raises:
            ConfigError: only one of the two numbers is set.
        """
        numbers = {"prefill_replicas": self.prefill_replicas, "decode_replicas": self.decode_replicas}
        missing = [name for name, number in numbers.items() if number is None]
        if len(missing) == 1:
            (configured,) = numbers.keys() - set(missing)
            raise ConfigError(f"fleet.{configured} requires fleet.{missing[0]}")
        return not missing


@dataclass(frozen=True, slots=True)
class TiersConfig:
    """Stores for blocks that are evicted from the device. Each is off unless its keys are set.

    Attributes:
        host_bytes: size of the host memory tier, in bytes. The memory is pinned if there is a GPU.
        disk_path: directory for the disk tier. Its blocks survive a restart with the same model. Only one process can
            use it at a time.
        disk_bytes: size of the disk tier, in bytes. Default: half of the free space at startup.
        redis_url: URL of a Redis or Valkey that all servers of one model share: `redis://[USER:PASSWORD@]HOST:PORT/DB`,
            `rediss://` for TLS, or `unix://PATH`.
        mooncake_master: `HOST:PORT` of the master of a Mooncake Store that all servers of one model share.
        mooncake_bytes: memory that this server contributes to the Mooncake Store, in bytes.
        known_blocks: number of most recently used blocks of each shared store that this server remembers, at least the
            number of blocks in the pool. For other blocks it asks the store.
        secret_file: file with a random secret of at least 16 bytes, the same on all servers that share a store or
            transfer K/V. It authenticates blocks on disk, in shared stores and from other servers, so that modified
            ones are never used. Without it, anyone who can read a store can test whether a prompt is in it.
        encryption_key_file: file with 64 hexadecimal digits, from which a key is derived per tenant. Blocks are
            encrypted on disk and in shared stores, not in host memory; modified ones are never used.
        trusted: whether to use shared stores, and a `disk_path` that other users can write, without `secret_file` and
            `encryption_key_file`. Every process that can write there can then change the outputs of the model.
    """

    host_bytes: _Bytes | None = None
    disk_path: str | None = None
    disk_bytes: _Bytes | None = None
    redis_url: str | None = None
    mooncake_master: str | None = None
    mooncake_bytes: _Bytes = 2**30
    known_blocks: _PositiveCount = 2**18
    secret_file: str | None = None
    encryption_key_file: str | None = None
    trusted: bool = False

    def __post_init__(self) -> None:
        require_fields("tiers", self)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """A store from a plug-in, below the tiers of section `tiers`; from a section `stores.NAME`.

    NAME is the name of an entry point in the group `radixkv.stores`.

    Attributes:
        place: passed to the plug-in: a directory, a URL, an address.
        max_bytes: passed to the plug-in: the size of the store in bytes. Default: the plug-in has a limit of its own.
        trusted: whether to use the store without `tiers.secret_file` and `tiers.encryption_key_file`. Every client
            that can write to it can then change the outputs of the model.
    """

    place: str = ""
    max_bytes: _Bytes | None = None
    trusted: bool = False

    def require(self, path: str) -> None:
        """Check all values and the name; see `AdapterConfig.require`."""
        require_fields(path, self)
        if path.removeprefix("stores.") in ("", "host", "disk", "redis", "mooncake"):
            raise ConfigError(
                f"{path}: expected the name of a plug-in's entry point; the built-in tiers have keys in section tiers"
            )


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Transfer of K/V between servers.

    Attributes:
        role: the calls that this server accepts: `both`; `prefill` does not accept Generate, and serves FetchKV even
            without `serve`; `decode` does not accept Prefill, and requires sections `kv_sources.NAME`.
        serve: whether the holder of a lease may fetch the K/V of its prompt with FetchKV.
        max_fetching_bytes: maximum size of K/V that was fetched from the sections `kv_sources.NAME` and is not yet on
            the device, in bytes; half of it per tenant. What exceeds it is computed instead.
    """

    role: Annotated[str, OneOf("both", "prefill", "decode")] = "both"
    serve: bool = False
    max_fetching_bytes: _Bytes = 2**30

    def __post_init__(self) -> None:
        require_fields("transfer", self)

    @property
    def sends(self) -> bool:
        """Whether this server answers FetchKV."""
        return self.serve or self.role == "prefill"


@dataclass(frozen=True, slots=True)
class KVSourceConfig:
    """A server from which K/V may be fetched, from a section `kv_sources.NAME`. Requests refer to it by its address.

    Attributes:
        address: `HOST:PORT`, as in the requests.
        token_file: file with the bearer token for that server; its tenants must include those whose K/V is fetched.
        tls_ca: PEM file with the certificate authorities of that server. Default: no TLS.
        trusted: whether to use its K/V without `tiers.secret_file`. That server, and without TLS any host that can
            change the traffic, can then change the outputs of the model.
    """

    address: str = ""
    token_file: str | None = None
    tls_ca: str | None = None
    trusted: bool = False

    def require(self, path: str) -> None:
        """Check all values; see `AdapterConfig.require`."""
        require_fields(path, self)
        host_and_port(f"{path}.address", self.address)


@dataclass(frozen=True, slots=True)
class TenantConfig:
    """Quotas and weight of one tenant.

    They come from a section `tenants.NAME`, or from `default_tenant` for every tenant without a section of its own.

    Attributes:
        floor_tokens: number of cached tokens that other tenants cannot evict; rounded up to whole blocks.
        ceiling_tokens: maximum number of cached and leased tokens; rounded down to whole blocks. Default: the whole
            pool.
        max_retained_tokens: maximum number of tokens with a retention priority above the default; rounded down to whole
            blocks. Default: what `cache.max_retained_share` allows.
        max_held_tokens: maximum number of tokens that held leases keep; rounded down to whole blocks. Default: half of
            what `cache.max_held_share` allows.
        uses_public_prefixes: whether prompts of the tenant reuse public prefixes, which are computed once for all
            tenants.
        weight: share of the computed tokens while tenants compete, relative to the default weight of 1.
        max_calls_per_s: maximum rate of Prefill, Generate, Hint and Explain calls, per second; further calls are
            refused with RESOURCE_EXHAUSTED. A Generate call counts once per completion, and a call with `explain` once
            more. Default: unlimited.
        max_computed_tokens_per_s: maximum rate of computed prompt tokens and generated tokens together, per second;
            while it is exceeded, calls are refused. Cached tokens do not count. Default: unlimited.
        rate_burst_s: burst size of both rates: unused capacity of this many seconds may be used at once.
    """

    floor_tokens: _Count = 0
    ceiling_tokens: _PositiveCount | None = None
    max_retained_tokens: _Count | None = None
    max_held_tokens: _Count | None = None
    uses_public_prefixes: bool = True
    weight: Annotated[float, Range(1e-3, 1e3)] = 1.0
    max_calls_per_s: _Rate | None = None
    max_computed_tokens_per_s: _Rate | None = None
    rate_burst_s: Annotated[float, Range(1e-3, 3600)] = 10.0

    def require(self, path: str) -> None:
        """Check all values; see `AdapterConfig.require`."""
        require_fields(path, self)
        if self.ceiling_tokens is not None:
            Range(self.floor_tokens).require(f"{path}.ceiling_tokens", self.ceiling_tokens)
