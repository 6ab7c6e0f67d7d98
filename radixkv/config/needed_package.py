"""The packages that keys of a configuration need."""

from __future__ import annotations

import importlib.util

from radixkv.errors import ConfigError


def missing_package(package: str, extra: str) -> str:
    """Say what is missing, and how to install it from a checkout; radixkv is on no package index yet."""
    return f"the package {package} is missing; install it from a checkout of radixkv: pip install '.[{extra}]'"


def require_package(key: str, module: str, package: str, extra: str) -> None:
    """Refuse a key whose package is not installed. Nothing is imported but the parents of a module with dots.

    Args:
        key: for the message.
        module: what the package is imported as.
        package: its name in an index.
        extra: of ours, which installs it.

    Raises:
        ConfigError: the message names the key and the command that installs the package.
    """
    try:
        is_missing = importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # a parent is missing
        is_missing = True
    if is_missing:
        raise ConfigError(f"{key}: {missing_package(package, extra)}")
