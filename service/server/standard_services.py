"""The standard services of gRPC, health and reflection, each where its package is installed."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable

import grpc.aio

from radixkv.service.server.health.health_status import HealthStatus

_logger = logging.getLogger(__name__)

_HEALTH = "grpc_health"
_REFLECTION = "grpc_reflection"
# module -> (service, package)
_PACKAGES = {
    _HEALTH: ("health", "grpcio-health-checking"),
    _REFLECTION: ("reflection", "grpcio-reflection"),
}


def add_standard_services(server: grpc.aio.Server, health: HealthStatus, services: Iterable[str]) -> None:
    """Add health and reflection to a server of these services; without its package, a service is left out."""
    services = [*services]
    if _is_installed(_HEALTH):
        from radixkv.service.server.health.servicer import SERVICE, add_health

        add_health(server, health)
        services.append(SERVICE)
    if _is_installed(_REFLECTION):
        from grpc_reflection.v1alpha import reflection

        reflection.enable_server_reflection((*services, reflection.SERVICE_NAME), server)


def log_missing_services() -> None:
    """Log one line that names the standard services whose packages are missing; none if all are there."""
    missing = [names for module, names in _PACKAGES.items() if not _is_installed(module)]
    if missing:
        _logger.warning(
            "the gRPC service of %s is off, because packages are missing: pip install %s",
            " and ".join(service for service, _ in missing),
            " ".join(package for _, package in missing),
        )


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
