"""Callers of the service: `Client` blocks, `AsyncClient` is awaited. Neither needs torch."""

from radixkv.api.retention import Retention
from radixkv.service.client.client import AsyncClient, Client, logits_of

__all__ = ["AsyncClient", "Client", "Retention", "logits_of"]
