"""The message for a package that is not installed."""

from __future__ import annotations


def missing_package(package: str, extra: str) -> str:
    """Say what is missing, and how to install it from a checkout; radixkv is on no package index yet."""
    return f"the package {package} is missing; install it from a checkout of radixkv: pip install '.[{extra}]'"
