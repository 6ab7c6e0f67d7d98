"""The limit of open files of this process, compared with the number of connections that the server accepts."""

from __future__ import annotations

import logging
import resource

from radixkv.config import ServerConfig

# Open files that are reserved for libraries and tiers, for up to 64 connections to the metrics port, and for up to 512
# to the event ports.
RESERVED_FILES = 1024

_logger = logging.getLogger(__name__)


def raise_open_file_limit(config: ServerConfig) -> None:
    """Raise the limit of open files as far as `server.max_connections` needs and the system allows.

    If the system does not allow enough, a warning is logged, and `max_connections` is lower than configured.
    """
    num_needed = config.max_connections * _num_ports(config) + RESERVED_FILES
    limit = _raise_limit(num_needed)
    if limit is not None and max_connections(config) < config.max_connections:
        _logger.warning(
            "server.max_connections: expected a limit of at least %d open files, got %d, so at most %d connections are "
            "accepted on each port; raise the limit (LimitNOFILE= in a systemd unit, ulimits.nofile in a compose file, "
            "ulimit -n in a shell), or lower server.max_connections",
            num_needed,
            limit,
            max_connections(config),
        )


def max_connections(config: ServerConfig) -> int:
    """Return the number of connections that each port accepts: as configured, or the port's share of the open files."""
    limit = _limit()
    if limit is None:
        return config.max_connections
    num_for_connections = limit - min(RESERVED_FILES, limit // 2)  # under a low limit, at least half of it
    return max(1, min(config.max_connections, num_for_connections // _num_ports(config)))


def _num_ports(config: ServerConfig) -> int:
    """Return the number of ports to which `server.max_connections` applies: all except the metrics port."""
    return 1 + (config.http_port is not None) + (config.admin_port is not None)


def _limit() -> int | None:
    """Return the limit of open files (the soft one); None if there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else soft


def _raise_limit(num_files: int) -> int | None:
    """Raise the limit of open files to a number, or as far as allowed, and return the limit; None if there is none."""
    limit = _limit()
    if limit is None or limit >= num_files:
        return limit
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    new_limit = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard))
    except (OSError, ValueError):  # macOS refuses more than kern.maxfilesperproc
        return limit
    return new_limit
