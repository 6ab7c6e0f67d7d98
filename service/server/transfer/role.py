"""The calls that a server takes, where prompts are computed on one and answers generated on another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixkv.config import Config
from radixkv.errors import ConfigError, SwitchedOff

if TYPE_CHECKING:  # the engine needs torch; this module does not
    from radixkv.engine.engine import Engine

_REFUSED_CALLS = {"both": "", "prefill": "Generate", "decode": "Prefill"}


def require_role(config: Config) -> None:
    """Check that a server can do what its role asks for.

    Raises:
        ConfigError: `transfer.role` does not go with the rest of the configuration.
    """
    role = config.transfer.role
    if role == "decode" and not config.kv_sources:
        raise ConfigError(f"transfer.role: expected sections kv_sources to fetch from beside {role}, got none")
    if role == "prefill" and config.gateway.enabled:
        raise ConfigError(f"transfer.role: expected gateway.enabled=false beside {role}, got one, which generates")


def require_call(engine: Engine, call: str) -> None:
    """Check that the role of a server has a call.

    Raises:
        SwitchedOff: it has not.
    """
    role = "both" if engine.transfer is None else engine.transfer.config.role
    if call == _REFUSED_CALLS[role]:
        raise SwitchedOff(f"{call}: expected a server whose transfer.role has it, got one with {role}")
