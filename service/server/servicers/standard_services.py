"""The standard services of gRPC, health and reflection, each if its package is installed."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable

from radixkv.service.server.guarded_server import GuardedServer
from radixkv.service.server.servicers.health_status import HealthStatus

_logger = logging.getLogger(__name__)

_HEALTH = "grpc_health"
_REFLECTION = "grpc_reflection"
# module -> (service, package)
_PACKAGES = {
    _HEALTH: ("health", "grpcio-health-checking"),
    _REFLECTION: ("reflection", "grpcio-reflection"),
}


def add_standard_services(server: GuardedServer, health: HealthStatus, services: Iterable[str]) -> None:
    """Add health and reflection to a server with these services. A service whose package is missing is left out."""
    services = [*services]
    if _is_installed(_HEALTH):
        from radixkv.service.server.servicers.health import SERVICE, add_health

        add_health(server, health)
        services.append(SERVICE)
    if _is_installed(_REFLECTION):
        from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

        names = (*services, reflection.SERVICE_NAME)
        servicer = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]  # not in its stubs
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)


def log_missing_services() -> None:
    """Log one line that names the standard services whose packages are missing, if any."""
    missing = [names for module, names in _PACKAGES.items() if not _is_installed(module)]
    if missing:
        _logger.warning(
            "the gRPC service of %s is off, because packages are missing: pip install %s",
            " and ".join(service for service, _ in missing),
            " ".join(package for _, package in missing),
        )


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
