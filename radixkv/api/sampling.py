"""Sampling parameters: how next tokens are selected, and when a generation ends."""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from radixkv.api.compression import Compression
from radixkv.api.constraint import Constraint
from radixkv.api.params import PrefillParams
from radixkv.errors import InvalidRequest

DEFAULT_MAX_NEW_TOKENS = 16
MAX_STOP_TOKEN_IDS = 1024
MAX_BIASED_TOKENS = 1024
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
# Beyond these bounds, a logit could overflow float32. Requests carry float32 numbers; the lower bound is the float32
# number that is nearest to 1e-6, which is a little less.
REPETITION_PENALTIES = (float(np.float32(1e-6)), 1e6)
MAX_TOP_LOGPROBS = 100
MAX_ANSWERS = 64
NUM_SEEDS = 2**64


def random_seed() -> int:
    """Return a random seed for a request without one: 0 to 2**64 - 1."""
    return secrets.randbits(64)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Options of a generation.

    A sampled token depends only on the seed, the token's position and the logits. So with `model.exactness = "exact"`,
    the same seed gives the same tokens in every batch, and after every preemption.

    Attributes:
        max_new_tokens: maximum number of tokens to generate, at least 1.
        temperature: divides the logits; 0 for greedy decoding.
        top_p: nucleus sampling: tokens are sampled from the smallest set whose cumulative probability reaches this
            value; more than 0, at most 1.
        top_k: tokens are sampled from the `top_k` most likely ones, including all that are as likely as the last of
            them; 0 for all tokens.
        min_p: tokens are sampled from those whose probability is at least `min_p` times that of the most likely token;
            0 to 1.
        repetition_penalty: divides positive logits of tokens in the prompt or the answer, and multiplies negative ones;
            1e-6 to 1e6, 1 for none.
        presence_penalty: subtracted from the logits of tokens in the answer, -2 to 2.
        frequency_penalty: subtracted once for each occurrence of the token in the answer, -2 to 2.
        min_tokens: none of the first `min_tokens` tokens is a stop token or an end-of-sequence token of the model,
            unless no other token is allowed.
        logit_bias: `(token_id, bias)`, biases of -100 to 100, added to the logits.
        logprobs: number of most likely tokens whose log probabilities are returned with each generated token, in
            addition to the log probability of the token itself; None for no log probabilities.
        prompt_logprobs: like `logprobs`, but for each token of the prompt except the first. The whole prompt is
            computed, whatever is cached.
        seed: 0 to 2**64 - 1; a random one by default.
        stop_token_ids: each of them ends the generation, and is its last token.
        ignore_eos: whether to continue after the model's own end-of-sequence tokens.
        constraint: a constraint on the answer, such as a grammar; the generation ends when it is complete. None for no
            constraint.
        compression: which K/V entries are kept during the generation; None for all.
        is_tool_call: whether the generated tokens contain a tool call; None if that is not known. Called when the
            generation ends.
        write_generated: whether to publish the generated tokens. `PrefillParams.write_cache` applies to the prompt.
    """

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = field(default_factory=random_seed)
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: Constraint | None = None
    compression: Compression | None = None
    is_tool_call: Callable[[Sequence[int]], bool] | None = None
    write_generated: bool = True

    def of_answer(self, index: int) -> Sampling:
        """Return the options of one of several completions of a prompt. Each has a seed of its own.

        Only the first completion returns the log probabilities of the prompt, since they are the same for all.
        """
        if index == 0:
            return self
        return dataclasses.replace(self, seed=(self.seed + index) % NUM_SEEDS, prompt_logprobs=None)

    def prompt_params(self, params: PrefillParams) -> PrefillParams:
        """Return the options of the prompt. If its log probabilities are requested, the cache is not read."""
        return params if self.prompt_logprobs is None else dataclasses.replace(params, read_cache=False)

    @property
    def takes_most_likely(self) -> bool:
        """Whether decoding is greedy: always the token with the largest logit of the model."""
        return self.temperature == 0 and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether options change which token is the most likely one."""
        has_penalty = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return has_penalty or self.min_tokens > 0 or bool(self.logit_bias) or self.constraint is not None

    def validate(self, vocab_size: int) -> None:
        """Reject options that are out of range.

        Raises:
            InvalidRequest: the message names the field, the expected range and the value.
        """
        if self.max_new_tokens < 1:
            raise InvalidRequest(f"max_new_tokens: expected at least 1, got {self.max_new_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidRequest(f"temperature: expected a finite number from 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InvalidRequest(f"top_p: expected more than 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise InvalidRequest(f"top_k: expected at least 0, got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise InvalidRequest(f"min_p: expected 0 to 1, got {self.min_p}")
        lowest, highest = REPETITION_PENALTIES
        if not lowest <= (penalty := self.repetition_penalty) <= highest:
            raise InvalidRequest(f"repetition_penalty: expected {lowest:g} to {highest:g}, got {penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -MAX_PENALTY <= (penalty := getattr(self, name)) <= MAX_PENALTY:
                raise InvalidRequest(f"{name}: expected {-MAX_PENALTY:g} to {MAX_PENALTY:g}, got {penalty}")
        if not 0 <= self.min_tokens <= self.max_new_tokens:
            raise InvalidRequest(
                f"min_tokens: expected 0 to max_new_tokens, {self.max_new_tokens}, got {self.min_tokens}"
            )
        max_logprobs = min(MAX_TOP_LOGPROBS, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None and not 0 <= count <= max_logprobs:
                raise InvalidRequest(f"{name}: expected 0 to {max_logprobs}, got {count}")
        self._validate_bias(vocab_size)
        if not (isinstance(self.seed, int) and 0 <= self.seed < NUM_SEEDS):
            raise InvalidRequest(f"seed: expected 0 to 2**64 - 1, got {self.seed!r}")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids: expected at most {MAX_STOP_TOKEN_IDS} of them, got {len(self.stop_token_ids)}"
            )
        for token_id in self.stop_token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"stop_token_ids: expected ids from 0 to below the vocabulary size {vocab_size}, got {token_id}"
                )
        if self.min_tokens and len(self.stop_token_ids) >= vocab_size:
            raise InvalidRequest("min_tokens: expected a token that is not in stop_token_ids, got none")
        if self.compression is not None:
            self.compression.validate()

    def _validate_bias(self, vocab_size: int) -> None:
        if len(self.logit_bias) > MAX_BIASED_TOKENS:
            raise InvalidRequest(f"logit_bias: expected at most {MAX_BIASED_TOKENS} tokens, got {len(self.logit_bias)}")
        for token_id, bias in self.logit_bias:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"logit_bias: expected ids from 0 to below the vocabulary size {vocab_size}, got {token_id}"
                )
            if not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                raise InvalidRequest(
                    f"logit_bias: expected {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g} for token {token_id}, got {bias}"
                )
