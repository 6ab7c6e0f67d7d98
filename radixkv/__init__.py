"""Prefix-caching prefill: a radix tree of token segments over reference-counted KV blocks.

    from radixkv import Client

`Client` and `AsyncClient` are imported when they are first used, so `import radixkv` itself stays light. Type checkers
find them in `__init__.pyi`.
"""

import importlib

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]

_LAZY = {"AsyncClient": "radixkv.service.client", "Client": "radixkv.service.client"}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
