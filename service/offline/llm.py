"""An engine in this process with the methods of vLLM's `LLM`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import itertools
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from radixkv.api.caller import Caller
from radixkv.api.constraint import Constraint
from radixkv.api.logprob_table import LogprobTable
from radixkv.api.params import PrefillParams
from radixkv.api.result import GeneratedTokens, GenerateResult, OnTokens, PrefillResult
from radixkv.api.sampling import Sampling, random_seed
from radixkv.config.needed_package import missing_package
from radixkv.errors import ConfigError, InvalidRequest, LifecycleError, StoreUnavailable
from radixkv.model_files.model_location import check_servable
from radixkv.service.missing_package import MissingPackage
from radixkv.service.offline.completion import Completion
from radixkv.service.offline.engine_batch import EngineBatch
from radixkv.service.offline.forced_tokens import ForcedTokens
from radixkv.service.offline.outputs import CompletionOutput, ContinuationScore, PrefillOutput, RequestOutput
from radixkv.service.offline.prompts import PreparedPrompt, PromptInput, error_place, prepare_pair, prompt_list
from radixkv.service.offline.request_slots import RequestSlots
from radixkv.service.offline.sampling_params import SamplingParams
from radixkv.service.offline.settings import config_of
from radixkv.service.progress_bar import progress_bar
from radixkv.service.server.model_tokenizer import ModelTokenizer
from radixkv.service.server.receive.fair_shares import QuotaKey
from radixkv.service.structured.grammar_text import GrammarText
from radixkv.service.structured.grammars import Grammars
from radixkv.service.text.tokenizer import Tokenizer
from radixkv.service.token_ids import pack_token_ids
from radixkv.startup.openmp_threads import bound_spinning
from radixkv.startup.requirements import require_secret_files

if TYPE_CHECKING:  # the engine needs torch, which is imported when an `LLM` is created
    from radixkv.engine.engine import Engine

Messages = Sequence[Mapping[str, Any]]

_PROGRESS_DELAY_S = 2.0  # after which a progress bar appears that the caller did not request
_GRAMMAR_KEY = QuotaKey.of_tenant("")  # all grammars count against its quota


class LLM:
    """A model in this process, with continuous batching and a prefix cache.

        with LLM("tiny") as llm:
            outputs = llm.generate(["Once upon a time", "In the beginning"], SamplingParams(max_tokens=20))
            print(outputs[0].outputs[0].text, outputs[0].num_cached_tokens)

    Methods that vLLM's `LLM` also has take its main arguments and return results of the same form. Several threads may
    call methods at the same time; their requests share steps and cached tokens. All prompts are validated before any of
    them is computed; an error message names the index of the invalid prompt.

    The number of threads of PyTorch is set, and from then on the process keeps freed memory and requests huge pages
    (`radixkv.startup.malloc`).

    Args:
        model: `tiny`, a directory with a config.json and safetensors, a GGUF file, or `ORG/NAME` of a model in the
            local cache of Hugging Face.
        config: a TOML file with a configuration, of which sections for servers have no effect; None for no file.
        settings: further values of the configuration, such as `tiers.host_bytes=1000000000`.
        adapters: directories of LoRA adapters by name.
        seed: determines, with the number of prompts so far, the seeds of prompts without a seed; None for random seeds.
        keys: keys of the sections model, cache and engine of the configuration, such as `device`, `dtype`, `weights`,
            `kv_dtype`, `capacity_tokens`, `threads` and `max_step_tokens`. Arguments of vLLM with values that change
            nothing, such as `tensor_parallel_size=1`, have no effect.

    Raises:
        ConfigError: the model cannot be served, or an argument is unknown or wrong. The message names it.
        MissingPackage: PyTorch is not installed.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "tiny",
        *,
        config: str | Path | None = None,
        settings: Iterable[str] = (),
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        seed: int | None = 0,
        **keys: Any,
    ) -> None:
        loaded = config_of(model, config, settings, adapters or {}, keys)
        if not (seed is None or (isinstance(seed, Integral) and not isinstance(seed, bool))):
            raise ConfigError(f"LLM: seed: expected an integer or None, got {type(seed).__name__}")
        if loaded.model.path != "tiny":
            check_servable(loaded.model.path)
        if importlib.util.find_spec("torch") is None:
            raise MissingPackage(missing_package("torch", "engine"), name="torch")
        require_secret_files(loaded)
        bound_spinning(os.environ)
        from radixkv.startup.build_engine import build_engine
        from radixkv.startup.malloc import give_back_freed_memory

        config_limits = loaded.engine
        max_unfinished_requests = config_limits.max_waiting_requests + config_limits.max_running_requests
        self._slots = RequestSlots(min(config_limits.max_tenant_requests, max_unfinished_requests))
        self._seeds = random.Random(random_seed() if seed is None else int(seed))
        self._request_ids = itertools.count()
        self._tokenizer = ModelTokenizer(loaded.model.path)
        self._grammar_lock = threading.Lock()
        engine = build_engine(loaded)
        # Stops the engine also if one of the next statements fails, and when the process exits.
        self._stop = weakref.finalize(self, engine.stop)
        self._engine: Engine | None = engine
        give_back_freed_memory()  # that the checks of the model used
        self._grammars = Grammars(self._tokenizer, engine.limits.vocab_size, engine.eos_token_ids)
        engine.start()

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close this object."""
        self.close()

    def close(self) -> None:
        """Cancel calls that still run, and end the threads of the engine. Does nothing if it is closed already."""
        self._stop()
        self._engine = None

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the model.

        Raises:
            InvalidRequest: the model has none that can be loaded.
            MissingPackage: a package that its files need is not installed.
        """
        try:
            return self._tokenizer.load()
        except ValueError as error:
            raise InvalidRequest(f"text requires a tokenizer, which the model does not have: {error}") from error

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its completion together: what the model and the pool allow."""
        return self._running_engine().limits.max_sequence_tokens

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that `generate` and `chat` use without `sampling_params`."""
        return SamplingParams()

    def reset_prefix_cache(self) -> bool:
        """Remove all cached tokens, also from tiers. Requests that run continue with the blocks that they use.

        Returns:
            True: no later request reuses what was cached before.

        Raises:
            StoreUnavailable: a tier did not confirm that it has deleted its blocks. The deletion is retried.
            LifecycleError: this object was closed, before the call or during it, or a step hangs.
        """
        engine = self._running_engine()
        try:
            purged = engine.purge().result()
        except CancelledError:
            raise engine.cancellation from None
        failed = [name for name, num_blocks in purged.stored_blocks.items() if num_blocks is None]
        if failed:
            raise StoreUnavailable(
                f"tiers: expected {', '.join(failed)} to delete the cached blocks, got no confirmation; the deletion "
                "is retried, and other processes may reuse these blocks until then"
            )
        return True

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        *,
        adapter: str = "",
    ) -> list[RequestOutput]:
        """Generate completions of prompts.

        Args:
            prompts: a prompt or a list of prompts: texts, lists of token ids, or mappings with `prompt` or
                `prompt_token_ids`, and perhaps `cache_salt`.
            sampling_params: the parameters of all prompts, or a list with the parameters of each prompt; None for the
                defaults.
            use_tqdm: whether to show a progress bar; None to show it on a terminal, if tqdm is installed and the call
                takes more than two seconds.
            adapter: name of the adapter to use; empty for the base model.

        Returns:
            The completions of each prompt, in order.

        Raises:
            RequestError: a prompt or a parameter is wrong, and nothing was computed. The message names the prompt if
                the error concerns only one.
            RadixKVError: this object was closed; or a request failed, for example because no token can follow its
                grammar, and the others were cancelled.
            MissingPackage: a package that the tokenizer needs is not installed.
        """
        prepared = []
        for index, prompt in enumerate(prompt_list(prompts)):
            with error_place(f"prompts[{index}]"):
                prepared.append(PreparedPrompt.of(prompt, self.get_tokenizer))
        return self._complete(prepared, "prompts", sampling_params, use_tqdm, adapter)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        adapter: str = "",
    ) -> list[RequestOutput]:
        """Generate answers to conversations, which the chat template of the model turns into prompts.

        Tool calls and reasoning are a part of the text, as the model writes them.

        Args:
            messages: a conversation, or a list of conversations; see `Tokenizer.encode_chat`.
            sampling_params, use_tqdm, adapter: see `generate`.
            tools, documents, add_generation_prompt, chat_template_kwargs: see `Tokenizer.encode_chat`.

        Returns:
            The completions of each conversation, in order.

        Raises:
            RadixKVError: see `generate`. Messages name `conversations`.
        """
        prepared = []
        for index, conversation in enumerate(_conversations(messages)):
            with error_place(f"conversations[{index}]"):
                tokenizer = self.get_tokenizer()
                text = tokenizer.render_chat(
                    conversation,
                    tools=tools,
                    documents=documents,
                    add_generation_prompt=add_generation_prompt,
                    chat_template_kwargs=chat_template_kwargs,
                )
                prepared.append(PreparedPrompt(text, pack_token_ids(tokenizer.encode_rendered(text))))
        return self._complete(prepared, "conversations", sampling_params, use_tqdm, adapter)

    def prefill(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        use_tqdm: bool | None = None,
        *,
        top_logprobs: int = 0,
        adapter: str = "",
    ) -> list[PrefillOutput]:
        """Compute and cache prompts, and return the logits of the next token of each.

        Args:
            prompts, use_tqdm, adapter: see `generate`.
            top_logprobs: number of most likely next tokens to return, at most the size of the vocabulary.

        Raises:
            RadixKVError: see `generate`.
        """
        engine = self._running_engine()
        prepared, requests = [], []
        for index, prompt in enumerate(prompt_list(prompts)):
            with error_place(f"prompts[{index}]"):
                encoded = PreparedPrompt.of(prompt, self.get_tokenizer)
                params = self._params(encoded, adapter, return_logits=True, top_logprobs=top_logprobs)
                _require_adapter(engine, params)
                engine.limits.require_prefill(params)
                prepared.append(encoded)
                requests.append(params)

        def start(params: PrefillParams, on_tokens: OnTokens) -> Future[PrefillResult]:
            return engine.prefill(params)

        def end(index: int, result: PrefillResult) -> PrefillOutput:
            on_end()
            assert result.logits is not None, "they were requested"
            return PrefillOutput(
                request_id=result.request_id,
                prompt=prepared[index].text,
                prompt_token_ids=prepared[index].token_ids,
                logits=result.logits,
                next_token_id=result.next_token_id,
                top_logprobs=result.top_logprobs,
                usage=result.usage,
                miss_reason=result.miss_reason.value,
            )

        with _progress("Computed prompts", len(requests), use_tqdm) as on_end:
            return EngineBatch(engine, self._slots, _ignore, end).run([partial(start, params) for params in requests])

    def score(
        self,
        contexts: PromptInput | Sequence[PromptInput],
        continuations: PromptInput | Sequence[PromptInput],
        use_tqdm: bool | None = None,
        *,
        adapter: str = "",
    ) -> list[ContinuationScore]:
        """Compute the log probabilities of continuations of contexts, for example of the choices of a question.

        A context is computed once, and each continuation reuses it from the cache. Continuations are computed token by
        token, with many of them in each step. For a text of which each token should be scored,
        `SamplingParams(prompt_logprobs=0, max_tokens=1)` needs fewer steps.

        A text is encoded together with its context, as lm-evaluation-harness does it: white space at the end of the
        context belongs to the continuation. vLLM's `LLM.score` is another function, which compares texts by embeddings.

        Args:
            contexts: one context for all continuations, or a list with one for each; see `generate`.
            continuations: a continuation or a list of continuations: texts or lists of token ids, of at least one token
                each.
            use_tqdm, adapter: see `generate`.

        Returns:
            The score of each continuation, in order.

        Raises:
            RadixKVError: see `generate`. Messages name `continuations`.
        """
        engine = self._running_engine()
        limits = engine.limits
        continuation_list, context_list = prompt_list(continuations), prompt_list(contexts)
        num_continuations = len(continuation_list)
        if len(context_list) == 1:
            context_list *= num_continuations
        if len(context_list) != num_continuations:
            raise InvalidRequest(
                f"contexts: expected one, or one for each of {num_continuations} continuations, got {len(context_list)}"
            )
        requests = []
        for index, (context, continuation) in enumerate(zip(context_list, continuation_list, strict=True)):
            with error_place(f"continuations[{index}]"):
                prompt, forced = prepare_pair(context, continuation, self.get_tokenizer)
                limits.require_tokens(forced.packed)
                params = self._params(prompt, adapter)
                _require_adapter(engine, params)
                sampling = Sampling(
                    max_new_tokens=len(forced.token_ids),
                    constraint=ForcedTokens(forced.token_ids, limits.vocab_size),
                    logprobs=1,
                    ignore_eos=True,
                    write_generated=False,
                )
                limits.require_generation(params, sampling)
                requests.append((params, sampling))
        logprobs = [LogprobTable(sampling.max_new_tokens) for _, sampling in requests]

        def end(index: int, result: GenerateResult) -> ContinuationScore:
            on_end()
            logprobs[index].extend(result.logprobs)
            token_ids = list(result.token_ids)
            token_logprobs = [each.logprob for each in logprobs[index]]
            most_likely_ids = [each.top[0][0] for each in logprobs[index]]
            return ContinuationScore(
                logprob=sum(token_logprobs),
                is_greedy=most_likely_ids == token_ids,
                token_ids=token_ids,
                token_logprobs=token_logprobs,
                num_cached_tokens=result.usage.cached_tokens,
            )

        with _progress("Scored continuations", len(requests), use_tqdm) as on_end:
            batch = EngineBatch(engine, self._slots, lambda index, tokens: logprobs[index].extend(tokens.logprobs), end)
            return batch.run([partial(engine.generate, *each) for each in requests])

    def _complete(
        self,
        prompts: Sequence[PreparedPrompt],
        place: str,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | None,
        adapter: str,
    ) -> list[RequestOutput]:
        """Generate the completions of prompts; `place` is the argument that contains them."""
        engine = self._running_engine()
        constraints: dict[GrammarText, Constraint | None] = {}
        groups: list[list[Completion]] = []  # the completions of each prompt
        for index, (prompt, options) in enumerate(
            zip(prompts, _per_prompt(sampling_params, len(prompts)), strict=True)
        ):
            with error_place(f"{place}[{index}]"):
                params = self._params(prompt, adapter, read_cache=not options.skip_reading_prefix_cache)
                sampling = self._sampling(engine, params, options, constraints)
                tokenizer = self.get_tokenizer() if options.detokenize else None
                groups.append(
                    [
                        Completion(number, params, sampling, options, engine.eos_token_ids, tokenizer)
                        for number in range(options.n)
                    ]
                )
        completions = list(itertools.chain.from_iterable(groups))

        def end(index: int, result: GenerateResult) -> CompletionOutput:
            on_end()
            return completions[index].end(result)

        with _progress("Generated completions", len(completions), use_tqdm) as on_end:
            batch = EngineBatch(engine, self._slots, lambda index, tokens: completions[index].add(tokens), end)
            outputs = iter(batch.run([partial(each.start, engine) for each in completions]))
        return [
            group[0].request_output(prompt, list(itertools.islice(outputs, len(group))))
            for prompt, group in zip(prompts, groups, strict=True)
        ]

    def _sampling(
        self,
        engine: Engine,
        params: PrefillParams,
        options: SamplingParams,
        constraints: dict[GrammarText, Constraint | None],
    ) -> Sampling:
        """Return the parameters of a prompt in the form of the engine, and refuse a prompt that cannot be computed.

        Args:
            engine: generates the completions.
            params: the prompt.
            options: the parameters.
            constraints: the grammars that were compiled for this call; a new one is added.
        """
        limits = engine.limits
        options.require_valid(limits.vocab_size)
        _require_adapter(engine, params)
        max_new_tokens = max(1, limits.max_new_tokens(params.num_tokens, params.caller.tenant))
        if options.max_tokens is not None:
            max_new_tokens = min(max_new_tokens, options.max_tokens)
        sampling = options.sampling(max_new_tokens, self._seeds.getrandbits(64))
        limits.require_generation(params, sampling)
        structured = options.structured
        if structured is None:
            return sampling
        text = structured.grammar_text
        if text not in constraints:
            constraints[text] = self._compile(text)
        return dataclasses.replace(sampling, constraint=constraints[text])

    def _compile(self, text: GrammarText) -> Constraint | None:
        """Compile a grammar, on another thread, because the caller's thread may run an event loop, as in a notebook."""
        with self._grammar_lock, ThreadPoolExecutor(1, "radixkv-grammar") as pool:
            constrained = self._grammars.constrain(Sampling(), text, _GRAMMAR_KEY)
            return pool.submit(asyncio.run, constrained).result().constraint

    def _params(self, prompt: PreparedPrompt, adapter: str, **options: Any) -> PrefillParams:
        """Return a prompt with its options in the form of the engine."""
        caller = Caller(adapter=adapter, salt=prompt.salt)
        return PrefillParams(prompt.packed, caller, str(next(self._request_ids)), **options)

    def _running_engine(self) -> Engine:
        if self._engine is None:
            raise LifecycleError("LLM: it was closed; create another one")
        return self._engine


def _ignore(index: int, tokens: GeneratedTokens) -> None:
    """Ignore new tokens, of which a prefill has none."""


def _progress(
    description: str, num_requests: int, use_tqdm: bool | None
) -> contextlib.AbstractContextManager[Callable[[], object]]:
    """Show a progress bar inside a `with` block, on a terminal only if the block takes long; see `progress_bar`."""
    delay_s = _PROGRESS_DELAY_S if use_tqdm is None else 0.0
    return progress_bar(description, num_requests, is_shown=use_tqdm, delay_s=delay_s, is_kept=True)


def _require_adapter(engine: Engine, params: PrefillParams) -> None:
    """Refuse the name of an adapter that is not loaded. Raises UnknownAdapter."""
    if params.caller.adapter:
        engine.adapters.digest_of(params.caller.adapter)


def _conversations(messages: Messages | Sequence[Messages]) -> Sequence[Messages]:
    """Return a list of conversations; a single conversation becomes a list of one, and an empty list stays empty."""
    first = messages[0] if messages else ()
    is_list = isinstance(first, Sequence) and not isinstance(first, str)
    return cast("Sequence[Messages]", messages if is_list else [messages])


def _per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    """Return the parameters of each prompt.

    Raises:
        InvalidRequest: there are more or fewer parameters than prompts.
    """
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if len(sampling_params) != num_prompts:
        raise InvalidRequest(
            f"sampling_params: expected one, or one for each of {num_prompts} prompts, got {len(sampling_params)}"
        )
    return sampling_params
