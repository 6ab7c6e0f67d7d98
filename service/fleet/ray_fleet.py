"""A fleet on Ray: its deployments, start and stop."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from radixkv.config import Config
from radixkv.config.needed_package import missing_package
from radixkv.errors import ConfigError
from radixkv.service.fleet.replica_facts import FleetSecrets
from radixkv.service.missing_package import MissingPackage

_log = logging.getLogger(__name__)

APPLICATION = "radixkv"
_OBJECT_STORE_BYTES = 80 * 2**20  # the fleet stores nothing there; the minimum of Ray is 75 MiB
_LOOPBACK = "127.0.0.1"
_ALL_ADDRESSES = "[::]"
_ROUTER = "radixkv.service.fleet.prefix_router:PrefixRouter"
_POLICY = "radixkv.service.fleet.replica:ReplicasForLoad"
# The ingress, its router and Ray's own calls share one event loop, so that routing a request needs no thread switch.
_ONE_LOOP = {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0", "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
# Read by Ray when it is imported.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0"}
# Ray starts workers with niceness 15; 0 gives engines the usual priority.
_USUAL_PRIORITY = {"RAY_worker_niceness": "0"}
# If Ray does not form clusters, which is its default on other systems than Linux, its processes listen on loopback.
# Otherwise they listen on all addresses, whatever the address of the node is.
_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_HEALTH_PERIOD_S = 2.0
_HEALTH_TIMEOUT_S = 10.0
_STOP_S = 20.0  # after the drain: connections are closed, and a replica with tiers saves its cache for up to 10 s
_MAX_STARTS = 3  # attempts of Ray to start a replica, before the start of the fleet fails


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The configuration of a fleet.

    Attributes:
        config: configuration of each engine; its section `server` is that of the ingress.
        min_replicas, max_replicas: bounds of autoscaling. Ignored if `config.fleet` has numbers of replicas by role.
        replica_host: address that replicas listen on; `node` for the address of their machine.
        cpus, gpus: per replica.
        ray_address: address of a running Ray cluster; None to start one on this machine for this process alone.
    """

    config: Config
    min_replicas: int
    max_replicas: int
    replica_host: str = _LOOPBACK
    cpus: float = 1.0
    gpus: float = 0.0
    ray_address: str | None = None


@contextlib.contextmanager
def running_fleet(plan: FleetPlan) -> Iterator[None]:
    """Start a fleet, and stop it at the end of the `with` block, in which the ingress accepts requests.

    Raises:
        MissingPackage: Ray is not installed.
        ConfigError: a replica does not start. The message has the cause if it is an error of this package.
    """
    variables = _QUIET if plan.ray_address else _QUIET | _USUAL_PRIORITY | _ON_LOOPBACK
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        from ray import serve
    except ModuleNotFoundError as error:
        raise MissingPackage(missing_package("ray", "ray")) from error
    ray.init(**_ray_options(plan))
    try:
        serve.start(http_options={"location": "NoServer"}, proxy_location="Disabled")
        try:
            serve.run(_application(plan), name=APPLICATION, route_prefix=None)
        except RuntimeError as error:
            messages = "\n".join(each.message for each in serve.status().applications[APPLICATION].deployments.values())
            serve.delete(APPLICATION)
            raise ConfigError(f"fleet: its replicas can't start: {_cause(messages)}") from error
        try:
            yield
        finally:
            serve.delete(APPLICATION)
            if plan.ray_address is None:
                serve.shutdown()
    finally:
        ray.shutdown()


def listen_on_loopback() -> None:
    """Make the gRPC server that Ray Serve starts in each of its processes listen on loopback.

    Ray calls this function at the start of each process of a fleet on one machine. Other servers of Ray listen on the
    address of the node; this one listens on all addresses in Ray 2.60, without a setting to change it.
    """
    from ray.serve._private import replica

    add_port: Any = replica.add_port_to_grpc_server

    def add_local_port(server: Any, address: str) -> Any:
        return add_port(server, address.replace(f"{_ALL_ADDRESSES}:", f"{_LOOPBACK}:"))

    replica.add_port_to_grpc_server = add_local_port


def _cause(messages: str) -> str:
    """Return the last error of this package in the status messages of a deployment.

    >>> _cause("... radixkv.errors.ConfigError: model.device: there is no GPU\\n  more")
    'model.device: there is no GPU'
    >>> _cause("out of luck")
    'see the logs of Ray'
    """
    errors = re.findall(r"radixkv\.errors\.\w+: (.+)", messages)
    return errors[-1] if errors else "see the logs of Ray"


def _ray_options(plan: FleetPlan) -> dict[str, Any]:
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
    if plan.ray_address is not None:
        return {"address": plan.ray_address, "namespace": APPLICATION, **quiet}
    # Ray starts only replicas for which it has enough CPUs, so it counts at least as many CPUs as all replicas request.
    max_replicas = sum(each.max_replicas for each in _deployments(plan))
    cpus = max(os.cpu_count() or 1, math.ceil(max_replicas * plan.cpus))
    return {
        "address": "local",
        "namespace": APPLICATION,
        "num_cpus": cpus,
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "_node_ip_address": _LOOPBACK,
        "runtime_env": {"worker_process_setup_hook": "radixkv.service.fleet.ray_fleet.listen_on_loopback"},
        **quiet,
    }


def _application(plan: FleetPlan) -> Any:
    """Return the Ray Serve application of the fleet."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    from radixkv.service.fleet.ingress import Ingress
    from radixkv.service.fleet.replica import Replica

    fleet = plan.config.fleet
    drain_s = plan.config.server.drain_timeout_s
    health_checks = {"health_check_period_s": _HEALTH_PERIOD_S, "health_check_timeout_s": _HEALTH_TIMEOUT_S}
    shutdown = {"graceful_shutdown_timeout_s": drain_s + _STOP_S, "graceful_shutdown_wait_loop_s": 0.1}
    routing = RequestRouterConfig(
        request_router_class=_ROUTER,
        request_router_kwargs={
            "routing": fleet.routing,
            "least_match_tokens": fleet.least_match_tokens,
            "health_timeout_s": fleet.health_timeout_s,
            "tls_ca": fleet.tls_ca,
            "tls_name": fleet.tls_name,
        },
    )
    secrets = FleetSecrets.make()
    replicas = []
    for deployment in _deployments(plan):
        scale: dict[str, Any] = {"num_replicas": deployment.min_replicas}
        if deployment.max_replicas > deployment.min_replicas:
            policy = AutoscalingPolicy(
                policy_function=_POLICY, policy_kwargs={"calls_per_replica": fleet.calls_per_replica}
            )
            scaling = AutoscalingConfig(
                min_replicas=deployment.min_replicas,
                max_replicas=deployment.max_replicas,
                policy=policy,
                upscale_delay_s=fleet.grow_after_s,
                downscale_delay_s=fleet.shrink_after_s,
            )
            scale = {"autoscaling_config": scaling}
        ray_deployment = serve.deployment(
            Replica,
            name=deployment.name,
            request_router_config=routing,
            ray_actor_options={"num_cpus": plan.cpus, "num_gpus": plan.gpus},
            max_constructor_retry_count=_MAX_STARTS,
            **scale,
            **health_checks,
            **shutdown,
        )
        replicas.append(ray_deployment.bind(with_role(plan.config, deployment.role), secrets, plan.replica_host))
    return serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": _ONE_LOOP}},
        **health_checks,
        **shutdown,
    ).bind(plan.config.server, fleet, *replicas)


class _Deployment(NamedTuple):
    """Replicas with the same role: the name of their Ray deployment, the role, and the bounds of their number."""

    name: str
    role: str
    min_replicas: int
    max_replicas: int


def _deployments(plan: FleetPlan) -> list[_Deployment]:
    """Return the deployments of a plan; prefill replicas come first."""
    fleet = plan.config.fleet
    if fleet.prefill_replicas is None or fleet.decode_replicas is None:
        return [_Deployment("Replica", plan.config.transfer.role, plan.min_replicas, plan.max_replicas)]
    return [
        _Deployment("Prefill", "prefill", fleet.prefill_replicas, fleet.prefill_replicas),
        _Deployment("Decode", "decode", fleet.decode_replicas, fleet.decode_replicas),
    ]


def with_role(config: Config, role: str) -> Config:
    """Return the configuration of a replica with a role."""
    return dataclasses.replace(config, transfer=dataclasses.replace(config.transfer, role=role))


def with_port(config: Config, port: int) -> Config:
    """Return the configuration with another port of the ingress."""
    return dataclasses.replace(config, server=dataclasses.replace(config.server, port=port))
