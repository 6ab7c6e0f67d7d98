"""Prefix-caching prefill for LLMs: radix trees of tokens over blocks of K/V memory.

In this process, without a server (docs/LIBRARY.md):

    from radixkv import LLM, SamplingParams

    with LLM("tiny") as llm:
        outputs = llm.generate(["Once upon a time", "In the beginning"], SamplingParams(max_tokens=20))
        print(outputs[0].outputs[0].text, outputs[0].num_cached_tokens)

With a server (`radixkv serve`, service/README.md):

    from radixkv import Client

    with Client("127.0.0.1:50051") as client:
        print(client.generate("Once upon a time", max_new_tokens=20).read())

These names are imported when they are first used, so `import radixkv` itself stays light. Type checkers find them in
`__init__.pyi`.
"""

import importlib

__version__ = "0.1.0"

_CLIENT, _OFFLINE = "radixkv.service.client", "radixkv.service.offline"
_LAZY = {
    "LLM": _OFFLINE,
    "AsyncClient": _CLIENT,
    "Client": _CLIENT,
    "CompletionOutput": _OFFLINE,
    "RequestOutput": _OFFLINE,
    "SamplingParams": _OFFLINE,
    "StructuredOutputsParams": _OFFLINE,
    "TextPrompt": _OFFLINE,
    "TokensPrompt": _OFFLINE,
}
__all__ = [*_LAZY, "__version__"]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
