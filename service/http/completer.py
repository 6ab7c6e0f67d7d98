"""Completes the prompts of HTTP requests, in the same way for all APIs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Protocol

from radixkv.api.limits import Limits
from radixkv.service.http.api_request import ApiRequest
from radixkv.service.http.breakpoints import Retain, RetainedRange, retained_chunks
from radixkv.service.http.completions import CompletionChunk, text_chunks
from radixkv.service.http.prompts import PromptEncoder
from radixkv.service.http.tools import EncodedChat
from radixkv.service.server.servicers.prefill import PrefillServicer
from radixkv.service.text.answer_format import AnswerFormat
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.v1.prefill_pb2 import GenerateRequest, ProbeRequest


class ApiPrompt(Protocol):
    """A conversation in the form of one API, such as `ChatPrompt`."""

    def encode(self, form: AnswerFormat, tokenizer: Tokenizer) -> EncodedChat:
        """Encode the conversation."""
        ...


class Completer:
    """Encodes the prompts of HTTP requests, generates their completions, and retains ranges of the prompts.

    Args:
        servicer: generates completions.
        retain: retains a range for some time; see `CacheServicer.Retain`.
        encoder: encodes prompts.
        limits: limits of the engine.

    Attributes:
        encoder, limits: the arguments.
    """

    def __init__(self, servicer: PrefillServicer, retain: Retain, encoder: PromptEncoder, limits: Limits) -> None:
        self.encoder = encoder
        self.limits = limits
        self._servicer = servicer
        self._retain = retain

    @property
    def unknown_model_message(self) -> str:
        """The message for a request whose field `model` names neither the served model nor a loaded adapter."""
        return f"model: expected {self.limits.model} or the name of a loaded adapter, got another name"

    async def encode(self, request: ApiRequest, prompt: ApiPrompt) -> EncodedChat:
        """Encode a conversation on a thread.

        Raises:
            InvalidRequest: the model has no tokenizer, or cannot encode or answer the conversation.
        """
        encode = partial(prompt.encode, await self.encoder.answer_format())
        return await self.encoder.encode(request.num_bytes, "messages", encode)

    def with_prompt(
        self, options: GenerateRequest, token_ids: Sequence[int], model: str, tenant: str
    ) -> GenerateRequest:
        """Add to the options of a request its prompt, the adapter, and the maximum length if it has none.

        Args:
            options: the options of the completions.
            token_ids: the prompt.
            model: the field `model`: the name of the served model or of an adapter; empty for the served model.
            tenant: the tenant of the request, which may have a ceiling.

        Returns:
            `options`.
        """
        options.prefill.token_ids.extend(token_ids)
        options.prefill.adapter = self.adapter_of(model)
        if not options.HasField("max_new_tokens"):
            options.max_new_tokens = max(1, self.limits.max_new_tokens(len(token_ids), tenant))
        return options

    async def chunks(
        self,
        request: ApiRequest,
        generate: GenerateRequest,
        stops: Sequence[str],
        shown_tags: Mapping[int, str],
        ranges: Sequence[RetainedRange],
    ) -> AsyncGenerator[CompletionChunk, None]:
        """Return the chunks of the completions of a prompt, which start when the first one is requested.

        Args:
            request: the HTTP request.
            generate: the prompt and the options; see `with_prompt`.
            stops: stop strings.
            shown_tags: texts of special tokens that are a part of the text, by their ids.
            ranges: the ranges of the prompt to retain, shortest first.
        """
        tokenizer = await self.encoder.tokenizer()
        chunks = text_chunks(self._servicer, generate, request.call, tokenizer, stops, shown_tags)
        return retained_chunks(chunks, ranges, generate.prefill, self._retain, request.call)

    async def require_model(self, request: ApiRequest, model: str, token_id: int, tenant: str) -> None:
        """Check the field `model` of a request that generates nothing.

        Raises:
            UnknownAdapter: it is neither the served model nor a loaded adapter.
        """
        adapter = self.adapter_of(model)
        if adapter:
            probe = ProbeRequest(token_ids=[token_id], tenant=tenant, adapter=adapter)
            await self._servicer.Probe(probe, request.call)

    def adapter_of(self, model: str) -> str:
        """Return the adapter that the field `model` names; empty for the served model."""
        return "" if model == self.limits.model else model
