"""Offline use: an engine in this process, without a server, with the methods of vLLM's `LLM`.

Neither torch nor gRPC is imported before an `LLM` is created.

Public API: `LLM`, `SamplingParams`, `StructuredOutputsParams`, `RequestOutput`, `CompletionOutput`, `Logprob`,
`PrefillOutput`, `ContinuationScore`, `TextPrompt`, `TokensPrompt`.
"""

from radixkv.service.offline.llm import LLM
from radixkv.service.offline.outputs import (
    CompletionOutput,
    ContinuationScore,
    Logprob,
    PrefillOutput,
    RequestOutput,
)
from radixkv.service.offline.prompts import TextPrompt, TokensPrompt
from radixkv.service.offline.sampling_params import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "ContinuationScore",
    "Logprob",
    "PrefillOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]
