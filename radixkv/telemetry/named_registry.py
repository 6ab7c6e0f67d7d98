"""A registry of metrics in which families are found by their names."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.registry import RestrictedRegistry

# What the names of a family's samples have behind the family's own.
_SUFFIXES = ("", "_total", "_bucket", "_sum", "_count", "_info")


class NamedRegistry(CollectorRegistry):
    """Collects metrics. A scrape that asks for `NAME` gets all series of the histogram or counter of that name."""

    def restricted_registry(self, names: Iterable[str]) -> RestrictedRegistry:
        """Return what collects only samples of these names, and of the families of these names."""
        return super().restricted_registry({name + suffix for name in names for suffix in _SUFFIXES})
