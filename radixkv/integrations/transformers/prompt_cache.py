"""A cache of transformers that starts with reused K/V, and publishes what is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from transformers import DynamicCache

from radixkv.errors import InvalidRequest, UnsupportedModel
from radixkv.integrations.transformers.kv_slots import KV
from radixkv.integrations.transformers.model_weights import ActiveAdapters, WeightVersions
from radixkv.integrations.transformers.prefix_store import MatchedPrefix, PrefixStore
from radixkv.namespace import Namespace
from radixkv.tokens import TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class PaddedPrompt:
    """One row of `input_ids`: a prompt and its padding on the left.

    Attributes:
        tokens: tokens without padding, little-endian uint32 bytes.
        num_pads: number of padding tokens before these.
    """

    tokens: bytes
    num_pads: int

    @property
    def num_tokens(self) -> int:
        """Length of the prompt without padding."""
        return len(self.tokens) // TOKEN_BYTES


@dataclass(slots=True)
class _Row:
    """A sequence of the batch.

    Attributes:
        prompt: prompt of the sequence.
        tokens: the tokens whose K/V are computed or reused, without `PromptCache._unread_tokens`.
        published_tokens: number of tokens that this row has published; 0 until the prompt is published.
        saved_keys: keys of the first blocks of the sequence, as far as this row has saved them in the tiers.
    """

    prompt: PaddedPrompt
    tokens: bytearray
    published_tokens: int = 0
    saved_keys: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _WindowRecord:
    """K/V of a layer with a sliding window, from position `start` on, which the layer itself soon drops.

    Attributes:
        start: position in the padded batch.
        pieces: keys and values, `[batch, num_kv_heads, num_positions, head_dim]`, one after another.
    """

    start: int
    pieces: list[KV] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + sum(keys.shape[2] for keys, _ in self.pieces)

    def drop_before(self, position: int) -> None:
        while self.pieces and self.start + self.pieces[0][0].shape[2] <= position:
            self.start += self.pieces.pop(0)[0].shape[2]

    def crop(self, end: int) -> None:
        while self.pieces and self.end > end:
            num_kept = self.pieces[-1][0].shape[2] - (self.end - end)
            keys, values = self.pieces.pop()
            if num_kept > 0:
                self.pieces.append((keys[:, :, :num_kept], values[:, :, :num_kept]))
        self.start = min(self.start, end)

    def read(self, row: int, start: int, end: int) -> KV:
        all_keys = torch.cat([keys[row] for keys, _ in self.pieces], dim=1)
        all_values = torch.cat([values[row] for _, values in self.pieces], dim=1)
        positions = slice(start - self.start, end - self.start)
        return all_keys[:, positions], all_values[:, positions]


class PromptCache(DynamicCache):  # type: ignore[misc]  # transformers has no types here
    """The cache of one call of `generate`, or of several that continue the same sequences.

        found in the store       computed
        [ reused K/V ......... | prompt ...... | generated .......... ]
                               └─ published    └─ published per block, and the rest by `close`

    `RadixCache.cache_for` creates it. It begins with contiguous copies of the reused K/V, which it then owns like any
    `DynamicCache`: nothing that is evicted later changes it, and if it is dropped, there is nothing to release.

    It sees the tokens of each forward pass of the model, so K/V are published under the tokens from which they were
    computed. Publishing ends, while everything else works, as soon as rows no longer continue the same sequences: after
    `reorder_cache` (beam search), `batch_select_indices` and `reset`. Without `write_generated`, publishing ends with
    the prompt.

    One thread may use it at a time.

    Args:
        model: the model whose forward passes use this cache.
        weights: the weights of the model. If they have changed, nothing more is published.
        adapters: the adapters of the model. The same ones must be active in each forward pass.
        store: where prefixes are found and published.
        namespace: the namespace of these prefixes.
        prompts: the rows of the batch, all of the same length with padding.
        epoch: epoch of the store in which the weights of the model were verified.
        write_generated: whether to publish generated tokens.

    Attributes:
        num_cached_tokens: number of reused tokens of each row.
    """

    def __init__(
        self,
        model: Any,
        weights: WeightVersions,
        adapters: ActiveAdapters,
        store: PrefixStore,
        namespace: Namespace,
        prompts: Sequence[PaddedPrompt],
        epoch: int,
        *,
        write_generated: bool,
    ) -> None:
        super().__init__(config=model.config.get_text_config(decoder=True))
        self._model = model
        self._weights = weights
        self._adapters = adapters
        self._store = store
        self._namespace = namespace
        self._epoch = epoch
        self._write_generated = write_generated
        self._prompt_length = prompts[0].num_pads + prompts[0].num_tokens
        self._records: dict[int, _WindowRecord] = {}
        self._next_tokens: torch.Tensor | None = None
        # Tokens that follow `_Row.tokens`, `[batch, num_new]` each, on the device of the model.
        self._unread_tokens: list[torch.Tensor] = []
        self._is_publishing = True
        self._is_closed = False
        with store.match(namespace, [each.tokens for each in prompts]) as prefixes:
            # A reused prefix ends at the same position in all rows, since they are computed together.
            ends = [each.num_pads + prefix.num_tokens for each, prefix in zip(prompts, prefixes, strict=True)]
            # If all rows have only padding before this position, nothing is reused, and the cache begins empty.
            self._length = min(ends) if any(min(ends) > each.num_pads for each in prompts) else 0
            if self._length:
                self._fill(prompts, prefixes)
        self._rows = [
            _Row(each, bytearray(each.tokens[: max(0, self._length - each.num_pads) * TOKEN_BYTES])) for each in prompts
        ]
        self.num_cached_tokens = tuple(map(self._num_tokens, self._rows))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def close(self) -> None:
        """Publish the generated tokens that do not fill a block. Closing again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._publish(is_last=True)

    def begin_forward(self, model: object, arguments: Mapping[str, Any]) -> None:
        """Verify that a forward pass continues the rows of this cache. Called by a hook of the model.

        After publishing has ended, only the model, its adapters and autocast are verified.

        Raises:
            InvalidRequest: the pass does not continue the rows, has other masks or positions than those of their
                tokens, or uses another model, other LoRA adapters or `torch.autocast`.
        """
        input_ids = arguments.get("input_ids")
        if torch.is_autocast_enabled(self._model.device.type):
            raise InvalidRequest(
                "RadixCache: expected a forward pass without torch.autocast, got one with it, whose K/V have other "
                "dtypes; load the model in the dtype that it should compute in"
            )
        if model is not self._model:
            raise InvalidRequest("RadixCache: this cache belongs to another model")
        if self._adapters.describe_active() != self._namespace.adapter:
            raise InvalidRequest(
                "RadixCache: expected the LoRA adapters that were active when this cache was created, got others; "
                "create another cache"
            )
        if not self._is_publishing:
            return
        if not isinstance(input_ids, torch.Tensor):
            raise InvalidRequest("RadixCache: expected input_ids in each forward pass, got none")
        num_rows, num_new_tokens = len(self._rows), input_ids.shape[1]
        if input_ids.shape[0] != num_rows:
            raise InvalidRequest(
                f"RadixCache: this cache is for {num_rows} sequences, got input_ids of {input_ids.shape[0]}; with "
                "num_beams or num_return_sequences, pass num_sequences to cache_for"
            )
        if self._length < self._prompt_length:
            self._require_own_tokens(_copy_to_host(input_ids))
        self._require_causal(arguments, num_new_tokens)
        self._next_tokens = input_ids.clone()  # the caller may overwrite its tensor before the tokens are read

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KV:
        """Append K/V of one layer, as `DynamicCache` does.

        Raises:
            InvalidRequest: no `begin_forward` preceded, although this cache still publishes.
        """
        if self._is_publishing:
            if self._next_tokens is None:
                raise InvalidRequest(
                    "RadixCache: expected a call of the model for which the cache was created, got one of another "
                    "model or of a part of it, or one after the RadixCache was closed"
                )
            if self.is_sliding[layer_idx]:
                record = self._records.setdefault(layer_idx, _WindowRecord(0))
                record.pieces.append((key_states.detach(), value_states.detach()))
        updated: KV = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return updated

    def end_forward(self) -> None:
        """Record that a forward pass is complete, and publish its K/V. Called by a hook of the model.

        Raises:
            UnsupportedModel: a layer has K/V of more or fewer tokens than the model was given.
        """
        if self._next_tokens is None:
            return
        tokens, self._next_tokens = self._next_tokens, None
        self._unread_tokens.append(tokens)
        self._length += tokens.shape[1]
        lengths = {layer.get_seq_length() for _, layer in stored_layers(self)}
        if lengths != {self._length}:
            raise UnsupportedModel(
                f"{type(self._model).__name__}: expected K/V of {self._length} tokens in each layer, got "
                f"{', '.join(map(str, sorted(lengths)))}"
            )
        self._publish(is_last=False)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens of all rows, as assisted decoding does with rejected ones.

        Args:
            tokens_to_remove: their number as a negative integer, as in transformers.

        Raises:
            InvalidRequest: a layer with a sliding window no longer has the K/V of the whole window before the new end.
        """
        self._require_windows(self._length + tokens_to_remove)
        self._read_tokens()
        super().crop(tokens_to_remove)
        num_removed = min(-tokens_to_remove, self._length)
        if num_removed <= 0:
            return
        self._length -= num_removed
        for row in self._rows:
            del row.tokens[max(0, self._length - row.prompt.num_pads) * TOKEN_BYTES :]
            row.published_tokens = min(row.published_tokens, self._num_tokens(row))
            del row.saved_keys[row.published_tokens // self._store.block_size :]
        for record in self._records.values():
            record.crop(self._length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row, so that each prompt gets several completions."""
        self._read_tokens()
        super().batch_repeat_interleave(repeats)
        self._rows = [
            _Row(row.prompt, row.tokens[:], row.published_tokens, row.saved_keys[:])
            for row in self._rows
            for _ in range(repeats)
        ]
        self.num_cached_tokens = tuple(each for each in self.num_cached_tokens for _ in range(repeats))
        for record in self._records.values():
            record.pieces = [
                (keys.repeat_interleave(repeats, dim=0), values.repeat_interleave(repeats, dim=0))
                for keys, values in record.pieces
            ]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the rows, as beam search does. From then on nothing is published."""
        self._stop_publishing()
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some of the rows. From then on nothing is published."""
        self._stop_publishing()
        super().batch_select_indices(indices)

    def reset(self) -> None:
        """Drop all K/V. From then on nothing is published."""
        self._stop_publishing()
        super().reset()

    def _fill(self, prompts: Sequence[PaddedPrompt], prefixes: Sequence[MatchedPrefix]) -> None:
        """Copy the reused K/V of all rows into contiguous tensors, `[batch, num_kv_heads, length, head_dim]`."""
        length = self._length
        for layer_id in prefixes[0].layer_ids:
            layer = self.layers[layer_id]
            start = max(0, length - layer.sliding_window + 1) if layer.is_sliding else 0
            rows = [
                prefix.read(layer_id, max(0, start - each.num_pads), max(0, length - each.num_pads))
                for each, prefix in zip(prompts, prefixes, strict=True)
            ]
            keys = _pad_rows([row_keys for row_keys, _ in rows], length - start)
            values = _pad_rows([row_values for _, row_values in rows], length - start)
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
            if layer.is_sliding:
                layer.cumulative_length = length
                self._records[layer_id] = _WindowRecord(start, [(keys, values)])

    def _require_own_tokens(self, tokens: np.ndarray[Any, np.dtype[np.uint32]]) -> None:
        """Refuse tokens that differ from the rest of the prompts."""
        end = min(self._length + tokens.shape[1], self._prompt_length)
        for index, (row, new_tokens) in enumerate(zip(self._rows, tokens, strict=True)):
            # Compare positions `[start, end)` of the padded batch, without the padding of the row.
            num_pads = row.prompt.num_pads
            start = max(self._length, num_pads)
            expected = row.prompt.tokens[(start - num_pads) * TOKEN_BYTES : max(0, end - num_pads) * TOKEN_BYTES]
            got = new_tokens[start - self._length : max(start, end) - self._length].tobytes()
            if got != expected:
                raise InvalidRequest(
                    f"RadixCache: input_ids[{index}] differ from those for which cache_for made this cache, or do not "
                    f"begin after the {self._length} tokens in it; a cache is for one prompt and its continuation"
                )

    def _require_causal(self, arguments: Mapping[str, Any], num_new_tokens: int) -> None:
        """Refuse attention masks other than that of the padding, and positions that do not count from its end."""
        pads = [row.prompt.num_pads for row in self._rows]
        end, max_pads = self._length + num_new_tokens, max(pads)
        positions = torch.arange(self._length, end)[None] - torch.tensor(pads)[:, None]  # [batch, num_new_tokens]
        mask = arguments.get("attention_mask")
        is_mask_right = mask is None and not max_pads
        if isinstance(mask, torch.Tensor) and mask.shape == (len(pads), end):
            mask = mask.cpu().bool()
            is_mask_right = bool(mask[:, max_pads:].all())
            if max_pads:
                expected_mask = torch.arange(min(max_pads, end))[None] >= torch.tensor(pads)[:, None]
                is_mask_right = is_mask_right and torch.equal(mask[:, :max_pads], expected_mask)
        if not is_mask_right:
            raise InvalidRequest(
                "RadixCache: attention_mask differs from the one that cache_for got: expected zeros for the padding on "
                "the left, and ones after it"
            )
        position_ids = arguments.get("position_ids")
        if position_ids is None:
            are_positions_right = not max_pads
        else:
            is_pad = positions < 0
            are_positions_right = position_ids.ndim == 2 and bool(((position_ids.cpu() == positions) | is_pad).all())
        if not are_positions_right:
            raise InvalidRequest("RadixCache: position_ids: expected those of each token after the padding, got others")

    def _require_windows(self, length: int) -> None:
        """Refuse to crop to a length at which a layer would not have its whole window."""
        for _, layer in stored_layers(self):
            num_dropped = layer.get_seq_length() - layer.keys.shape[2]
            if not num_dropped:
                continue
            min_length = num_dropped + layer.sliding_window - 1
            if length < min_length:
                raise InvalidRequest(
                    f"crop: expected to keep at least {min_length} tokens, got {length}: a layer has dropped a part of "
                    "the sliding window before them; call activate_past_recording before these tokens are computed, "
                    "or create another cache"
                )

    def _stop_publishing(self) -> None:
        self._is_publishing = False
        self._next_tokens = None
        self._unread_tokens = []
        self._records = {}

    def _num_tokens(self, row: _Row) -> int:
        """Return the number of tokens of a row whose K/V are in this cache."""
        return max(0, self._length - row.prompt.num_pads)

    def _read_tokens(self) -> None:
        """Append the unread tokens to the rows. On a GPU this waits for the forward pass that computed them."""
        if not self._unread_tokens:
            return
        tokens = _copy_to_host(torch.cat(self._unread_tokens, dim=1))
        first = self._length - tokens.shape[1]  # position of the first unread token
        self._unread_tokens = []
        for row, new_tokens in zip(self._rows, tokens, strict=True):
            row.tokens += new_tokens[max(0, row.prompt.num_pads - first) :].tobytes()

    def _publish(self, *, is_last: bool) -> None:
        """Publish whole prompts, then whole blocks of generated tokens, and the remaining tokens if `is_last`."""
        if not self._is_publishing or self._length < self._prompt_length:
            return
        block_size = self._store.block_size
        published: set[bytes] = set()
        for index, row in enumerate(self._rows):
            num_tokens = self._num_tokens(row)
            if not self._write_generated:
                num_tokens = row.prompt.num_tokens
            elif row.published_tokens and not is_last:
                num_tokens = num_tokens // block_size * block_size
            if num_tokens > row.published_tokens:
                if not published and not self._weights.are_current():
                    self._stop_publishing()
                    return
                self._read_tokens()
                tokens = bytes(row.tokens[: num_tokens * TOKEN_BYTES])
                if tokens not in published:  # the completions of a prompt begin as equal rows
                    self._publish_row(index, row, tokens)
                    published.add(tokens)
                row.published_tokens = num_tokens
        if not self._write_generated:
            self._stop_publishing()
            return
        end = min(row.prompt.num_pads + row.published_tokens for row in self._rows)
        for record in self._records.values():
            record.drop_before(end)

    def _publish_row(self, index: int, row: _Row, tokens: bytes) -> None:
        num_pads = row.prompt.num_pads

        def read(start: int, end: int) -> dict[int, KV]:
            start, end = start + num_pads, end + num_pads
            kv = {}
            for layer_id, layer in stored_layers(self):
                if layer.is_sliding:
                    kv[layer_id] = self._records[layer_id].read(index, start, end)
                else:
                    kv[layer_id] = (
                        layer.keys[index, :, start:end].detach(),
                        layer.values[index, :, start:end].detach(),
                    )
            return kv

        # Windowed layers have dropped what is before their records.
        first = max((0, *(each.start - num_pads for each in self._records.values())))
        self._store.publish(self._namespace, tokens, row.published_tokens, first, read, self._epoch, row.saved_keys)


def stored_layers(cache: DynamicCache) -> Iterator[tuple[int, Any]]:
    """Iterate over the layers of a cache that keep K/V. Some models have layers that use the K/V of other layers."""
    for layer_id, layer in enumerate(cache.layers):
        if layer.is_initialized and hasattr(layer, "get_seq_length"):
            yield layer_id, layer


def _copy_to_host(input_ids: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Copy tokens from the device, `[batch, num_tokens]`."""
    tokens: np.ndarray[Any, np.dtype[np.uint32]] = input_ids.cpu().numpy().astype(np.uint32)
    return tokens


def _pad_rows(rows: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """Stack the states of all rows, with zeros on the left of shorter rows.

    Args:
        rows: states of each row, `[num_kv_heads, num_positions, head_dim]`.
        length: positions of the result.
    """
    if len(rows) == 1:
        return rows[0][None]
    num_heads, _, head_dim = rows[0].shape
    padded = rows[0].new_zeros(len(rows), num_heads, length, head_dim)
    for row, states in zip(padded, rows, strict=True):
        row[:, length - states.shape[1] :] = states
    return padded
