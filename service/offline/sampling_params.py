"""Sampling parameters with the names and defaults of vLLM's `SamplingParams`."""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from radixkv.api.sampling import MAX_ANSWERS, NUM_SEEDS, Sampling
from radixkv.errors import InvalidRequest
from radixkv.service.server.servicers.stop_strings import require_stops
from radixkv.service.structured.grammar_text import GrammarText

_MAX_TOKENS = 2**31 - 1
_MAX_VOCABULARY = 2**32

_INTEGERS = ("n", "top_k", "min_tokens", "max_tokens", "seed", "logprobs", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs"}

# What to do instead of using a field of vLLM that is not supported.
_INSTEAD = {
    "allowed_token_ids": "use structured_outputs or logit_bias",
    "bad_words": "use logit_bias",
    "best_of": "use n, and choose by cumulative_logprob",
    "extra_args": "leave it out",
    "guided_decoding": "use structured_outputs",
    "logits_processors": "use logit_bias",
    "logprob_token_ids": "use logprobs",
    "repetition_detection": "use repetition_penalty",
    "thinking_token_budget": "use max_tokens",
    "truncate_prompt_tokens": "shorten the prompt before the call",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputsParams:
    """What a completion must follow: exactly one of the fields. They need the extra `structured`.

    Attributes:
        json: a JSON schema, as text or as an object.
        regex: a regular expression of Rust's crate regex, for the whole completion.
        choice: texts, one of which is the completion.
        grammar: a grammar in Lark's syntax or llama.cpp's.
        json_object: whether the completion is any JSON object.

    Raises:
        InvalidRequest: there is not exactly one field, or `regex`, `choice` or `grammar` has another type.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        names = [each.name for each in fields(self) if getattr(self, each.name) not in (None, False)]
        if len(names) != 1:
            expected = ", ".join(each.name for each in fields(self))
            raise InvalidRequest(f"structured_outputs: expected one of {expected}, got {', '.join(names) or 'none'}")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidRequest(f"structured_outputs.{name}: expected text, got another type")
        choice = self.choice
        if choice is not None and (isinstance(choice, str) or not all(isinstance(each, str) for each in choice)):
            raise InvalidRequest("structured_outputs.choice: expected a list of texts, got another type")

    @property
    def grammar_text(self) -> GrammarText:
        """The grammar that a completion must follow."""
        if self.json is not None:
            text = self.json if isinstance(self.json, str) else json_text.dumps(self.json)
            return GrammarText("structured_outputs.json", "json_schema", text)
        if self.regex is not None:
            return GrammarText("structured_outputs.regex", "regex", self.regex)
        if self.choice is not None:
            return GrammarText.of_choices("structured_outputs.choice", self.choice)
        if self.grammar is not None:
            return GrammarText("structured_outputs.grammar", "grammar", self.grammar)
        return GrammarText.of_json_object("structured_outputs.json_object")


@dataclass(kw_only=True, slots=True)
class SamplingParams:
    """How the tokens of completions are sampled, and when they end. Names and defaults are those of vLLM.

    The values are checked here, and again when they are used, because fields may be assigned as in vLLM.

    Attributes:
        n: number of completions of each prompt, 1 to 64. Each has a seed of its own.
        temperature: divides the logits; 0 for greedy decoding.
        top_p: nucleus sampling: tokens are sampled from the smallest set whose cumulative probability reaches this
            value; more than 0, at most 1.
        top_k: tokens are sampled from the `top_k` most likely ones; 0 or -1 for all.
        min_p: tokens are sampled from those whose probability is at least `min_p` times that of the most likely token.
        seed: makes the completions reproducible, unless the `LLM` has `exactness="fast"`; None for the next seed of the
            `LLM`.
        stop: texts that end a completion; at most 16 of at most 256 characters.
        stop_token_ids: tokens that end a completion.
        max_tokens: maximum number of tokens of a completion; None for as many as fit. A completion never exceeds what
            the model and the pool allow, see `LLM.max_model_len`.
        min_tokens: number of tokens before which no stop string, stop token or end-of-sequence token ends a completion,
            unless a grammar allows no other token.
        ignore_eos: whether to continue after the model's own end-of-sequence tokens.
        logprobs: number of most likely tokens whose log probabilities are returned with each token, in addition to
            the log probability of the token itself, 0 to 100; None for no log probabilities.
        prompt_logprobs: like `logprobs`, but for the tokens of the prompt; the whole prompt is then computed, whatever
            is cached.
        presence_penalty: subtracted from the logits of tokens in the completion, -2 to 2.
        frequency_penalty: subtracted once for each occurrence of the token in the completion, -2 to 2.
        repetition_penalty: divides positive logits of tokens in the prompt or the completion, and multiplies negative
            ones; 1 for none.
        logit_bias: biases of -100 to 100 that are added to the logits, by token id.
        structured_outputs: what the completion must follow; an object, or a mapping with one of its fields.
        detokenize: whether to return text.
        skip_special_tokens: whether special tokens are left out of the text. If not, no spaces are added around them.
        spaces_between_special_tokens: has no effect.
        include_stop_str_in_output: whether the text includes the stop string or the stop token that ended it.
        skip_reading_prefix_cache: whether to compute the whole prompt, whatever is cached.
        allowed_token_ids, bad_words, best_of, extra_args, guided_decoding, logits_processors, logprob_token_ids,
            repetition_detection, thinking_token_budget, truncate_prompt_tokens: not supported; must be None.

    Raises:
        InvalidRequest: a value is out of range or not supported. The message names the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    skip_reading_prefix_cache: bool | None = None
    allowed_token_ids: None = field(default=None, repr=False)
    bad_words: None = field(default=None, repr=False)
    best_of: None = field(default=None, repr=False)
    extra_args: None = field(default=None, repr=False)
    guided_decoding: None = field(default=None, repr=False)
    logits_processors: None = field(default=None, repr=False)
    logprob_token_ids: None = field(default=None, repr=False)
    repetition_detection: None = field(default=None, repr=False)
    thinking_token_budget: None = field(default=None, repr=False)
    truncate_prompt_tokens: None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.require_valid(_MAX_VOCABULARY)

    @property
    def stops(self) -> tuple[str, ...]:
        """The different stop strings."""
        return tuple(dict.fromkeys([self.stop] if isinstance(self.stop, str) else self.stop or ()))

    @property
    def structured(self) -> StructuredOutputsParams | None:
        """What the completion must follow.

        Raises:
            InvalidRequest: the value is not a mapping, or has other fields, or does not have exactly one of them.
        """
        outputs = self.structured_outputs
        if outputs is None or isinstance(outputs, StructuredOutputsParams):
            return outputs
        names = [each.name for each in fields(StructuredOutputsParams)]
        if not isinstance(outputs, Mapping) or not outputs.keys() <= set(names):
            raise InvalidRequest(f"structured_outputs: expected one of the fields {', '.join(names)}, got others")
        return StructuredOutputsParams(**outputs)

    def require_valid(self, vocab_size: int) -> None:
        """Refuse values that are out of range.

        Raises:
            InvalidRequest: the message names the field.
        """
        for name, instead in _INSTEAD.items():
            if getattr(self, name) is not None:
                raise InvalidRequest(f"{name}: this engine does not support it; {instead}")
        self._require_types()
        if not 1 <= self.n <= MAX_ANSWERS:
            raise InvalidRequest(f"n: expected 1 to {MAX_ANSWERS}, got {self.n}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequest(f"max_tokens: expected at least 1, or None, got {self.max_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(f"min_tokens: expected at most max_tokens, {self.max_tokens}, got {self.min_tokens}")
        require_stops(self.stops)
        if self.stops and not self.detokenize:
            raise InvalidRequest("stop: expected it only with detokenize=True")
        _ = self.structured  # refuses a wrong value
        self.sampling(_MAX_TOKENS if self.max_tokens is None else self.max_tokens, 0).validate(vocab_size)

    def _require_types(self) -> None:
        for names, kind, expected in ((_INTEGERS, Integral, "an integer"), (_NUMBERS, Real, "a number")):
            for name in names:
                value = getattr(self, name)
                if isinstance(value, bool) or not (isinstance(value, kind) or (value is None and name in _OPTIONAL)):
                    or_none = " or None" if name in _OPTIONAL else ""
                    raise InvalidRequest(f"{name}: expected {expected}{or_none}, got {type(value).__name__}")
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or ()
        if not all(isinstance(each, str) for each in stops):
            raise InvalidRequest("stop: expected text or a list of texts, got another type")
        if not all(isinstance(each, Integral) for each in self.stop_token_ids or ()):
            raise InvalidRequest("stop_token_ids: expected integers, got another type")

    def sampling(self, max_new_tokens: int, seed: int) -> Sampling:
        """Return these parameters in the form of the engine, without `structured_outputs`.

        Args:
            max_new_tokens: maximum number of tokens of the completion.
            seed: used if `self.seed` is None.
        """
        return Sampling(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=(seed if self.seed is None else self.seed) % NUM_SEEDS,
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            top_k=0 if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            min_tokens=self.min_tokens,
            logit_bias=tuple(sorted((int(token_id), bias) for token_id, bias in (self.logit_bias or {}).items())),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )
