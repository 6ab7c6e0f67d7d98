"""The error of a missing package."""

from __future__ import annotations


class MissingPackage(ModuleNotFoundError):
    """A package of an extra is not installed; the message says how to install it."""
