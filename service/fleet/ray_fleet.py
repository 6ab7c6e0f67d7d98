"""A fleet on Ray: what it consists of, its start and its end."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
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
_OBJECT_STORE_BYTES = 80 * 2**20  # nothing is kept there; Ray takes no less than 75 MiB
_LOCAL = "127.0.0.1"
_ROUTER = "radixkv.service.fleet.prefix_router:PrefixRouter"
_POLICY = "radixkv.service.fleet.replica:ReplicasForLoad"
# The ingress, its router and Ray's own calls share one event loop: a request passes from one to the other at no cost.
_ONE_LOOP = {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0", "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
# Read by Ray when it is imported.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_SERVE_LOG_TO_STDERR": "0"}
# Ray starts workers with niceness 15; 0 gives engines the usual priority.
_USUAL_PRIORITY = {"RAY_worker_niceness": "0"}
# Where Ray makes no clusters, as by default on other systems, all its processes listen on loopback. Otherwise they
# listen on all addresses, whatever address a node is given.
_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_HEALTH_PERIOD_S = 2.0
_HEALTH_TIMEOUT_S = 10.0
_STOP_S = 20.0  # beside the drain: connections end, and a replica with stores saves its cache for up to 10 s
_MOST_STARTS = 3


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The wanted fleet.

    Attributes:
        config: of each engine; its section `server` is the ingress's.
        least_replicas, most_replicas: of which there are as many as their load asks for. Where `config.fleet` has
            numbers of replicas by their roles, these count alone.
        replica_host: address that replicas listen on; `node` for that of their machine.
        cpus, gpus: of each replica.
        ray_address: of a running Ray cluster; None to start one on this machine, for this process alone.
    """

    config: Config
    least_replicas: int
    most_replicas: int
    replica_host: str = _LOCAL
    cpus: float = 1.0
    gpus: float = 0.0
    ray_address: str | None = None


@contextlib.contextmanager
def running_fleet(plan: FleetPlan) -> Iterator[None]:
    """Start a fleet, and stop it after the block. In the block it takes requests at the address of its ingress.

    Raises:
        MissingPackage: Ray is not installed.
        ConfigError: a replica does not start. The message has the cause, if it is one of ours.
    """
    for name, value in (_QUIET | ({} if plan.ray_address else _USUAL_PRIORITY | _ON_LOOPBACK)).items():
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
            told = "\n".join(each.message for each in serve.status().applications[APPLICATION].deployments.values())
            serve.delete(APPLICATION)
            raise ConfigError(f"fleet: expected replicas that start, got {_cause(told)}") from error
        try:
            yield
        finally:
            serve.delete(APPLICATION)
            if plan.ray_address is None:
                serve.shutdown()
    finally:
        ray.shutdown()


def _cause(told: str) -> str:
    """Return the last error of ours in what Ray tells of a deployment.

    >>> _cause("... radixkv.errors.ConfigError: model.device: expected cuda, got none\\n  more")
    'model.device: expected cuda, got none'
    >>> _cause("out of luck")
    'others: see the logs of Ray'
    """
    found = re.findall(r"radixkv\.errors\.\w+: (.+)", told)
    return found[-1] if found else "others: see the logs of Ray"


def _ray_options(plan: FleetPlan) -> dict[str, Any]:
    quiet = {"log_to_driver": False, "logging_level": logging.WARNING}
    if plan.ray_address is not None:
        return {"address": plan.ray_address, "namespace": APPLICATION, **quiet}
    cpus = max(os.cpu_count() or 1, round(sum(each.most for each in _groups(plan)) * plan.cpus + 0.5))
    return {
        "address": "local",
        "namespace": APPLICATION,
        "num_cpus": cpus,
        "include_dashboard": False,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "_node_ip_address": _LOCAL,
        "runtime_env": {"worker_process_setup_hook": "radixkv.service.fleet.loopback.listen_on_loopback"},
        **quiet,
    }


def _application(plan: FleetPlan) -> Any:
    """Describe the fleet to Ray."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    from radixkv.service.fleet.ingress import Ingress
    from radixkv.service.fleet.replica import Replica

    fleet, drain_s = plan.config.fleet, plan.config.server.drain_timeout_s
    lives = {"health_check_period_s": _HEALTH_PERIOD_S, "health_check_timeout_s": _HEALTH_TIMEOUT_S}
    ends = {"graceful_shutdown_timeout_s": drain_s + _STOP_S, "graceful_shutdown_wait_loop_s": 0.1}
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
    for group in _groups(plan):
        number: dict[str, Any] = {"num_replicas": group.least}
        if group.most > group.least:
            policy = AutoscalingPolicy(
                policy_function=_POLICY, policy_kwargs={"calls_per_replica": fleet.calls_per_replica}
            )
            scaling = AutoscalingConfig(
                min_replicas=group.least,
                max_replicas=group.most,
                policy=policy,
                upscale_delay_s=fleet.grow_after_s,
                downscale_delay_s=fleet.shrink_after_s,
            )
            number = {"autoscaling_config": scaling}
        described = serve.deployment(
            Replica,
            name=group.name,
            request_router_config=routing,
            ray_actor_options={"num_cpus": plan.cpus, "num_gpus": plan.gpus},
            max_constructor_retry_count=_MOST_STARTS,
            **number,
            **lives,
            **ends,
        )
        replicas.append(described.bind(with_role(plan.config, group.role), secrets, plan.replica_host))
    return serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=1,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": _ONE_LOOP}},
        **lives,
        **ends,
    ).bind(plan.config.server, fleet, *replicas)


class _Group(NamedTuple):
    """Replicas that take the same calls: Ray's name for them, their role, and how many there are."""

    name: str
    role: str
    least: int
    most: int


def _groups(plan: FleetPlan) -> list[_Group]:
    """Return the replicas of a plan: those that compute prompts come first."""
    fleet = plan.config.fleet
    if fleet.prefill_replicas is None or fleet.decode_replicas is None:
        return [_Group("Replica", plan.config.transfer.role, plan.least_replicas, plan.most_replicas)]
    return [
        _Group("Prefill", "prefill", fleet.prefill_replicas, fleet.prefill_replicas),
        _Group("Decode", "decode", fleet.decode_replicas, fleet.decode_replicas),
    ]


def with_role(config: Config, role: str) -> Config:
    """Return the configuration of a replica with a role."""
    return dataclasses.replace(config, transfer=dataclasses.replace(config.transfer, role=role))


def with_port(config: Config, port: int) -> Config:
    """Return the configuration with another port of the ingress."""
    return dataclasses.replace(config, server=dataclasses.replace(config.server, port=port))
