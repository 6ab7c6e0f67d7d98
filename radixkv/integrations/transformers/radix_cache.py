"""The prefix cache of one model of transformers."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from transformers import DynamicCache

from radixkv.cache.eviction_policy import EvictionPolicy
from radixkv.config.sequence_limit import sequence_limit
from radixkv.errors import InvalidRequest, LifecycleError, PromptTooLong
from radixkv.integrations.tiers.options import TierOptions
from radixkv.integrations.transformers.block_tiers import require_local
from radixkv.integrations.transformers.model_requirements import (
    CACHE_NAMES,
    cache_name,
    require_only_tokens,
    require_reusable,
)
from radixkv.integrations.transformers.model_weights import (
    ActiveAdapters,
    WeightVersions,
    describe_computation,
    digest_of_model,
)
from radixkv.integrations.transformers.prefix_store import PrefixStore
from radixkv.integrations.transformers.prompt_cache import PaddedPrompt, PromptCache, stored_layers
from radixkv.namespace import Namespace

_NUM_TEST_TOKENS = 64
_UNLIMITED_TOKENS = 2**31  # more than any prompt has

# Options of `generate` that switch assisted decoding on.
_ASSISTANT_OPTIONS = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


@dataclass(frozen=True, slots=True)
class ReuseCounts:
    """What a `RadixCache` has saved so far.

    Attributes:
        num_prompts: rows of `input_ids` for which caches were created.
        num_prompt_tokens: tokens of these rows, without padding.
        num_cached_tokens: how many of these tokens were reused.
        num_evicted_blocks: blocks that were evicted to make room.
        num_used_blocks: blocks that hold K/V now.
    """

    num_prompts: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_evicted_blocks: int
    num_used_blocks: int


class RadixCache:
    """Keeps the K/V of prompts and completions over calls of `generate`, in a radix tree of blocks.

        radix = RadixCache(model, capacity_tokens=65_536)
        out = radix.generate(**inputs, max_new_tokens=20)

    The second line is equivalent to

        with radix.cache_for(**inputs) as cache:
            out = model.generate(**inputs, cache=cache, max_new_tokens=20)  # past_key_values=cache in older releases

    K/V that are reused have the same bits as those that were computed, unless `kv_dtype` quantizes them. What is
    computed after them is what transformers computes when it continues one of its own caches: its GEMMs may round
    differently for another number of tokens, so logits may differ in their last bits from those without a cache.

    The cache is bound to the model object. Before each call it verifies that no parameter and no persistent buffer was
    replaced or changed in place, and otherwise drops everything. PyTorch's version counter does not count changes of
    `.data`, nor of weights that were created in `torch.inference_mode`: call `clear` after such changes. Active LoRA
    adapters are a part of the namespace; a `PromptCache` that was created with some adapters refuses forward passes
    with others.

    Several threads may use the cache at the same time, on a GPU with the same CUDA stream, if the model allows this.

    Args:
        model: a decoder-only model with full or sliding attention, in eval mode.
        capacity_tokens: maximum number of tokens whose K/V are kept. Memory for all layers is allocated when the first
            prompt is computed, or with `tiers` when they are opened. Layers with sliding windows keep all tokens as
            well, so that any prefix can be reused.
        block_size: tokens per block. A prefix may also end inside a block.
        policy: decides what is evicted first; must not be shared with another cache. None for the least recently used.
        device: where to keep K/V, such as `cpu` for a model on a GPU; None for the device of the model.
        kv_dtype: how to keep K/V: `auto` (as the model computes them), `fp8`, `int8` or `k8v4` (keys in int8, values in
            int4). The scale of a quantized vector takes 4 additional bytes. A hit then changes the answer a little,
            since the call that computed a prompt used the K/V before they were quantized.
        tiers: where whole blocks are also kept, so that they can be loaded after the cache has evicted them and, with a
            disk, after a restart: `host_bytes`, `disk_path`, `disk_bytes` and other options of `TierOptions.of`. The
            weights are read once, for a digest that identifies the model, and each version of the weights has a disk
            directory of its own.

    Raises:
        UnsupportedModel: the model cannot continue from K/V alone, or there are `tiers` and some weights are not in
            memory. The message gives the reason.
        InvalidRequest: `capacity_tokens` or `block_size` is too small, or `kv_dtype` is unknown or does not fit the
            model.
        ConfigError: an option of the tiers is invalid, or a tier is too small for one block.
    """

    def __init__(
        self,
        model: Any,
        capacity_tokens: int = 65_536,
        *,
        block_size: int = 16,
        policy: EvictionPolicy | None = None,
        device: str | torch.device | None = None,
        kv_dtype: str = "auto",
        tiers: Mapping[str, Any] | None = None,
    ) -> None:
        if block_size < 1:
            raise InvalidRequest(f"block_size: expected at least 1, got {block_size}")
        if capacity_tokens < block_size:
            raise InvalidRequest(
                f"capacity_tokens: expected at least one block of {block_size} tokens, got {capacity_tokens}"
            )
        require_reusable(model)
        limit = sequence_limit(model.config.get_text_config(decoder=True).to_dict())
        self.model = model
        self._vocab_size = model.config.get_text_config(decoder=True).vocab_size
        self._limit_reason = limit.reason
        # Without a reason why longer sequences are not served, transformers decides what is too long.
        self._max_tokens = limit.max_tokens if limit.reason and limit.max_tokens is not None else _UNLIMITED_TOKENS
        self._store = PrefixStore(
            capacity_tokens // block_size,
            block_size,
            self._max_tokens,
            policy,
            None if device is None else torch.device(device),
            kv_dtype,
        )
        self._cache_name = cache_name(model)
        self._lock = threading.Lock()
        self._tier_options = None if tiers is None else TierOptions.of(tiers)
        self._weights = WeightVersions(model)
        self._are_tiers_due = self._tier_options is not None
        if not model.training:
            self._open_tiers()  # reports wrong options early
        self._is_closed = False
        self._num_prompts = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._hooks = (
            model.register_forward_pre_hook(_begin_forward, with_kwargs=True),
            model.register_forward_hook(_end_forward, with_kwargs=True),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free all K/V, and remove the hooks from the model. Closing again does nothing.

        Caches that have not ended publishing then refuse their next forward pass, so wait for calls of other threads
        first.
        """
        with self._lock:
            self._is_closed = True
            for hook in self._hooks:
                hook.remove()
            self._store.close_tiers()
            self._store.clear()

    @property
    def counts(self) -> ReuseCounts:
        """What was reused so far."""
        with self._lock:
            return ReuseCounts(
                self._num_prompts,
                self._num_prompt_tokens,
                self._num_cached_tokens,
                self._store.num_evicted_blocks,
                self._store.num_used_blocks,
            )

    @property
    def tier_counts(self) -> dict[str, int]:
        """What the tiers have saved, loaded and missed, in blocks; see `ByteStore.counts`. Empty without tiers."""
        return self._store.tier_counts()

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated for K/V, without tiers."""
        return self._store.num_bytes

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        tenant: str = "",
        salt: str = "",
        write_generated: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Call `model.generate` with a cache for these prompts, and return its result.

        Args:
            input_ids, attention_mask, tenant, salt, write_generated: see `cache_for`.
            kwargs: further arguments of `model.generate`.

        Raises:
            InvalidRequest, PromptTooLong, LifecycleError: see `cache_for`. InvalidRequest also if `kwargs` has a cache,
                or an option of assisted decoding is set.
        """
        if names := [name for name in CACHE_NAMES if kwargs.get(name) is not None]:
            raise InvalidRequest(f"{names[0]}: RadixCache.generate creates the cache itself; expected none")
        if names := [name for name in _ASSISTANT_OPTIONS if self._option(name, kwargs)]:
            raise InvalidRequest(
                f"{names[0]}: assisted decoding of transformers computes the whole prompt, whatever its cache holds; "
                "call model.generate without a RadixCache"
            )
        sequence_counts = [self._option(name, kwargs) or 1 for name in ("num_beams", "num_return_sequences")]
        if attention_mask is not None:
            kwargs["attention_mask"] = attention_mask
        with self.cache_for(
            input_ids,
            attention_mask,
            tenant=tenant,
            salt=salt,
            num_sequences=max(sequence_counts),
            write_generated=write_generated,
        ) as cache:
            return self.model.generate(input_ids, **{self._cache_name: cache}, **kwargs)

    def cache_for(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        tenant: str = "",
        salt: str = "",
        num_sequences: int = 1,
        write_generated: bool = True,
    ) -> PromptCache:
        """Create the cache of one call of `model.generate` or `model`, with the K/V that can be reused.

        Rows of a batch are padded on the left. A batch reuses cached prefixes up to the same column of `input_ids` in
        all rows: the first column at which the cached prefix of a row ends. If nothing of a row is cached, its cached
        prefix ends with its padding.

        Args:
            input_ids: the prompts that `generate` gets, int64 `[batch, length]`.
            attention_mask: zeros for the padding on the left, and ones, `[batch, length]`; None for no padding.
            tenant, salt: names; prompts reuse only what was computed under the same names.
            num_sequences: sequences per prompt: `num_beams`, or `num_return_sequences` if that is more.
            write_generated: whether later prompts may reuse generated tokens.

        Returns:
            A cache for `generate`. Leaving its context, or `close`, publishes the last generated tokens; without that
            they are published in whole blocks only.

        Raises:
            InvalidRequest: an argument is wrong, or the model is in training mode.
            PromptTooLong: a prompt is so long that its length would change the K/V of its tokens.
            LifecycleError: this object was closed.
            ConfigError, UnsupportedModel: tiers are opened in this call, and cannot be; see `RadixCache`.
        """
        prompts = list(self._split_rows(input_ids, attention_mask))
        if num_sequences < 1:
            raise InvalidRequest(f"num_sequences: expected at least 1, got {num_sequences}")
        if self.model.training:
            raise InvalidRequest("model: expected a model in eval mode, got one in training mode; call model.eval()")
        with self._lock:
            if self._is_closed:
                raise LifecycleError("RadixCache: it was closed; create another one")
            if not self._weights.are_current():
                self._store.close_tiers()
                self._store.clear()
                self._expect_other_weights()
            self._open_tiers()
            epoch, weights = self._store.epoch, self._weights
        adapters = ActiveAdapters(self.model)
        cache = PromptCache(
            self.model,
            weights,
            adapters,
            self._store,
            Namespace(type(self.model).__name__, tenant, adapters.describe_active(), salt),
            prompts,
            epoch,
            write_generated=write_generated,
        )
        with self._lock:
            self._num_prompts += len(prompts)
            self._num_prompt_tokens += sum(each.num_tokens for each in prompts)
            self._num_cached_tokens += sum(cache.num_cached_tokens)
        if num_sequences > 1:
            cache.batch_repeat_interleave(num_sequences)
        return cache

    def clear(self, *, tenant: str | None = None, salt: str | None = None) -> None:
        """Evict what was computed under these names, and delete it from the tiers; None matches any name.

        What other weights have computed stays on the disk, in directories of its own. Caches that `cache_for` or
        `generate` created before, under any names, publish nothing after this.

        Raises:
            StoreError: a tier did not delete its blocks, so they may be found after a restart.
        """
        with self._lock:
            if tenant is not None or salt is not None or self._is_closed:
                self._store.clear(tenant, salt)
                return
            try:
                self._store.clear()
            finally:
                self._store.close_tiers()  # if they could not be cleared, they stay closed
            self._expect_other_weights()

    def _expect_other_weights(self) -> None:
        """Let the next call with a model in eval mode open the tiers, for the weights that the model then has."""
        self._weights = WeightVersions(self.model)
        self._are_tiers_due = self._tier_options is not None

    def _open_tiers(self) -> None:
        """Open the tiers if they are due. This computes a test prompt, for the shapes and the bits of K/V."""
        if not self._are_tiers_due or self._tier_options is None:
            return
        require_local(self._tier_options)
        cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        num_tokens = min(_NUM_TEST_TOKENS, self._max_tokens)
        with torch.no_grad():
            self.model(
                input_ids=torch.arange(num_tokens, device=self.model.device)[None] % self._vocab_size,
                **{self._cache_name: cache},
                use_cache=True,
            )
        kv = {layer_id: (layer.keys[0], layer.values[0]) for layer_id, layer in stored_layers(cache)}
        computed_by = describe_computation(self.model, kv)
        self._store.open_tiers(self._tier_options, digest_of_model(self.model), computed_by, kv)
        self._are_tiers_due = False

    def _option(self, name: str, kwargs: Mapping[str, Any]) -> Any:
        """Return an option of `generate`: from the call, its generation configuration, or that of the model."""
        configs = (kwargs.get("generation_config"), self.model.generation_config)
        values = (kwargs.get(name), *(getattr(each, name, None) for each in configs))
        return next((each for each in values if each is not None), None)

    def _split_rows(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> Iterator[PaddedPrompt]:
        """Yield the prompt of each row; see `cache_for` for the errors."""
        if input_ids.ndim != 2 or not input_ids.numel() or input_ids.is_floating_point():
            raise InvalidRequest(
                f"input_ids: expected token ids [batch, length], got {input_ids.dtype} {list(input_ids.shape)}"
            )
        rows = input_ids.cpu().numpy()
        if attention_mask is None:
            mask = np.ones(rows.shape, bool)
        elif attention_mask.shape == input_ids.shape:
            mask = attention_mask.cpu().numpy() != 0
        else:
            raise InvalidRequest(
                f"attention_mask: expected the shape of input_ids, {list(input_ids.shape)}, got "
                f"{list(attention_mask.shape)}"
            )
        vocab_size = self._vocab_size
        for index, (row, is_token) in enumerate(zip(rows, mask, strict=True)):
            num_pads = int((~is_token).sum())
            if num_pads == row.size or not is_token[num_pads:].all():
                raise InvalidRequest(
                    f"attention_mask[{index}]: expected padding on the left and at least one token, got another mask; "
                    "set tokenizer.padding_side to left"
                )
            tokens = row[num_pads:]
            if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
                raise InvalidRequest(f"input_ids[{index}]: expected token ids from 0 to {vocab_size - 1}, got others")
            if tokens.size > self._max_tokens:
                raise PromptTooLong(
                    f"input_ids[{index}]: expected at most {self._max_tokens} tokens, got {tokens.size}; "
                    f"{self._limit_reason}"
                )
            yield PaddedPrompt(tokens.astype("<u4").tobytes(), num_pads)


def _begin_forward(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Pass the arguments of a forward pass to its `PromptCache`, if it has one."""
    cache = _cache_of(model, args, kwargs)
    if cache is not None:
        arguments = _arguments_by_name(model, args, kwargs)
        require_only_tokens(arguments)
        cache.begin_forward(model, arguments)


def _end_forward(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
    cache = _cache_of(model, args, kwargs)
    if cache is not None:
        cache.end_forward()


def _cache_of(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PromptCache | None:
    values = _arguments_by_name(model, args, kwargs) if len(args) > 1 else kwargs
    return next((each for name in CACHE_NAMES if isinstance(each := values.get(name), PromptCache)), None)


def _arguments_by_name(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
