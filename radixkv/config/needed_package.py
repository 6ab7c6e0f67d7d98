"""Optional packages that a configuration key needs."""

from __future__ import annotations

import importlib.util

from radixkv.errors import ConfigError


def missing_package(package: str, extra: str) -> str:
    """Return an error message with the command that installs the package. radixkv is not on a package index yet."""
    return f"the package {package} is missing; install it from a checkout of radixkv: pip install '.[{extra}]'"


def require_package(key: str, module: str, package: str, extra: str) -> None:
    """Raise `ConfigError` if the package of a key is not installed. Only parent packages of `module` are imported.

    Args:
        key: name of the key, for the error message.
        module: import name of the package.
        package: name of the package on the package index.
        extra: extra of radixkv that installs it.

    Raises:
        ConfigError: the message names the key and the command that installs the package.
    """
    try:
        is_missing = importlib.util.find_spec(module) is None
    except ModuleNotFoundError:  # a parent package is missing
        is_missing = True
    if is_missing:
        raise ConfigError(f"{key}: {missing_package(package, extra)}")
