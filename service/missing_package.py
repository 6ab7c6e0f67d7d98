"""The error of a package that is not installed."""

from __future__ import annotations

from radixkv.config.needed_package import missing_package

__all__ = ["MissingPackage", "missing_package"]


class MissingPackage(ModuleNotFoundError):
    """A package of an extra is not installed; the message says how to install it."""
