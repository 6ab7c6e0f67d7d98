"""Prefix-caching prefill: a radix tree of token segments over reference-counted KV blocks."""

__version__ = "0.1.0"
