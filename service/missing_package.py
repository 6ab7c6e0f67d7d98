"""The error of a package that is not installed."""

from __future__ import annotations


class MissingPackage(ModuleNotFoundError):
    """A package of an extra is not installed; the message says how to install it."""


def missing_package(package: str, extra: str) -> str:
    """Say what is missing, and how to install it from a checkout; radixkv is on no package index yet."""
    return f"the package {package} is missing; install it from a checkout of radixkv: pip install '.[{extra}]'"
