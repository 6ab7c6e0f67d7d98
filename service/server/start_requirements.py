"""Refuses what can't be served before PyTorch is imported and a model is loaded."""

from __future__ import annotations

from radixkv.config import Config
from radixkv.service.server.events.publishing import require_publishable
from radixkv.service.server.identity.requirements import require_secure
from radixkv.service.server.listen_address import require_free
from radixkv.service.server.transfer.kv_sources import require_sources
from radixkv.service.server.transfer.role import require_role
from radixkv.startup.requirements import require_usable
from radixkv.telemetry.otlp import require_exportable


def require_startable(config: Config) -> None:
    """Check all that a server needs of its configuration and of this machine, except for the model.

    Raises:
        ConfigError: the message names the key.
    """
    require_secure(config.server)
    require_free(config.server)
    require_publishable(config.events)
    require_role(config)
    require_sources(config.kv_sources)
    require_usable(config)
    require_exportable(config.telemetry)
