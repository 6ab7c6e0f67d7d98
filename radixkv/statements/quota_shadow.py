"""Estimates how many more tokens tenants would have saved with twice their ceiling, by shadow sampling."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from radixkv.cache.tenant_ledger import TenantLedger
from radixkv.tokens import TOKEN_BYTES

MAX_SAMPLED_BLOCKS = 16_384  # maximum capacity of the larger shadow of a tenant
_MAX_WAITING_BYTES = 64 * 2**20
_REQUEST_BYTES = 512  # memory of a queued request besides its tokens; measured: 280
_LEDGER_FIELD = "more_hit_tokens_at_twice_ceiling"

_log = logging.getLogger(__name__)


class ShadowRequest(NamedTuple):
    """A request whose first token was generated.

    Attributes:
        seed: seed of its namespace; see `Namespace.seed`.
        tokens: its prompt, followed by its generated tokens if it published them; little-endian uint32 bytes.
        num_read_tokens: number of tokens, from the first one on, that it looked up.
        num_written_tokens: number of tokens, from the first one on, that it published.
    """

    seed: int
    tokens: bytes
    num_read_tokens: int
    num_written_tokens: int


class PrefixHashes:
    """Hashes prefixes of prompts. The hash function is random, so that clients cannot choose what is sampled."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(secrets.randbits(128))
        self._factors = np.empty(0, np.uint64)

    def compute(self, tokens: bytes, seed: int) -> npt.NDArray[np.uint64]:
        """Return a 64-bit hash of each token together with all tokens before it; uint64 `[num_tokens]`."""
        num_tokens = len(tokens) // TOKEN_BYTES
        if self._factors.size < num_tokens:
            num_new_factors = max(num_tokens, 4096) - self._factors.size
            new_factors = self._random.integers(2**64 - 1, size=num_new_factors, dtype=np.uint64) | np.uint64(1)
            self._factors = np.concatenate((self._factors, new_factors))
        ids = np.frombuffer(tokens, "<u4", num_tokens).astype(np.uint64) + np.uint64(1)
        hashes: npt.NDArray[np.uint64] = np.cumsum(ids * self._factors[:num_tokens])
        hashes ^= np.uint64(seed)
        for shift, factor in (31, 0x9E3779B97F4A7C15), (29, 0xBF58476D1CE4E5B9):  # mix high bits into low ones
            hashes ^= hashes >> np.uint64(shift)
            hashes *= np.uint64(factor)
        hashes ^= hashes >> np.uint64(32)
        return hashes


class _Tail(NamedTuple):
    """A partly filled block: the number of its tokens, and its key."""

    num_tokens: int
    key: int


class _Shadow:
    """An LRU cache of the keys of blocks."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        # By key: None for a whole block, and the key of the previous block for a partly filled one.
        self.blocks: OrderedDict[int, int | None] = OrderedDict()
        self.tails: dict[int, _Tail] = {}  # by the key of the previous block

    def touch(self, key: int) -> None:
        self.blocks[key] = None
        self.blocks.move_to_end(key)

    def touch_tail(self, key: int, tail: _Tail) -> None:
        self.drop_tail(key)
        self.tails[key] = tail
        self.blocks[tail.key] = key
        self.blocks.move_to_end(tail.key)

    def drop_tail(self, key: int) -> None:
        tail = self.tails.pop(key, None)
        if tail is not None:
            del self.blocks[tail.key]

    def evict(self) -> None:
        while len(self.blocks) > self.max_blocks:
            key, previous_key = self.blocks.popitem(last=False)
            if previous_key is not None:
                del self.tails[previous_key]
            else:
                self.drop_tail(key)


class QuotaShadow:
    """Two LRU caches of sampled blocks: with the ceiling of a tenant, and with twice that.

    A block is in the sample if its hash is a multiple of `2**k`, and the capacities of both shadows are divided by
    `2**k`; this is the spatially hashed sampling of SHARDS. A hit that occurs only in the larger shadow counts as
    `2**k` blocks. The difference between the shadows is more accurate than the hit rate of either: it does not matter
    whether blocks that both have, such as system prompts, are in the sample. The partly filled block at the end of a
    prompt takes as much capacity as a whole one, until a longer prompt replaces it; it is in the sample if the block
    before it is.

    Source: Waldspurger et al.: "Efficient MRC construction with SHARDS", FAST 2015.

    Args:
        ceiling_blocks: the ceiling of the tenant.
        block_size: tokens per block.
    """

    def __init__(self, ceiling_blocks: int, block_size: int) -> None:
        self._blocks_per_sample = 1  # 2**k
        while 2 * ceiling_blocks > MAX_SAMPLED_BLOCKS * self._blocks_per_sample:
            self._blocks_per_sample *= 2
        self._block_size = block_size
        self._small = _Shadow(max(1, ceiling_blocks // self._blocks_per_sample))
        self._large = _Shadow(max(1, 2 * ceiling_blocks // self._blocks_per_sample))

    def replay(self, hashes: npt.NDArray[np.uint64], num_read_tokens: int, num_written_tokens: int) -> int:
        """Replay a request.

        Args:
            hashes: from `PrefixHashes`, for all tokens that it looked up or published.
            num_read_tokens, num_written_tokens: see `ShadowRequest`.

        Returns:
            The estimated number of tokens that only twice the ceiling would have saved.
        """
        size = self._block_size
        ends = hashes[size - 1 :: size]
        indices = np.flatnonzero((ends & np.uint64(self._blocks_per_sample - 1)) == 0)
        blocks = list(zip(indices.tolist(), ends[indices].tolist(), strict=True))
        shadows = (self._small, self._large)
        num_saved = [self._count_saved(shadow, blocks, hashes, num_read_tokens) for shadow in shadows]
        for shadow in shadows:
            self._write(shadow, blocks, hashes, num_written_tokens)
            shadow.evict()
        return max(0, num_saved[1] - num_saved[0]) * self._blocks_per_sample

    def _count_saved(
        self, shadow: _Shadow, blocks: Sequence[tuple[int, int]], hashes: npt.NDArray[np.uint64], num_read_tokens: int
    ) -> int:
        num_saved = 0
        for index, key in blocks:
            end = (index + 1) * self._block_size
            if end >= num_read_tokens:  # the last token is always computed
                break
            if key in shadow.blocks:
                num_saved += self._block_size
            tail = shadow.tails.get(key)
            if tail is not None and end + tail.num_tokens < num_read_tokens and _continues(hashes, end, tail):
                num_saved += tail.num_tokens
        return num_saved

    def _write(
        self,
        shadow: _Shadow,
        blocks: Sequence[tuple[int, int]],
        hashes: npt.NDArray[np.uint64],
        num_written_tokens: int,
    ) -> None:
        """Publish and use blocks from the end of a prompt, so that its beginning is evicted last."""
        for index, key in reversed(blocks):
            end = (index + 1) * self._block_size
            if end > num_written_tokens and key not in shadow.blocks:
                continue
            num_tail_tokens = num_written_tokens - end
            tail = shadow.tails.get(key)
            if tail is not None and num_tail_tokens > tail.num_tokens and _continues(hashes, end, tail):
                shadow.drop_tail(key)
            if 0 < num_tail_tokens < self._block_size:
                shadow.touch_tail(key, _Tail(num_tail_tokens, int(hashes[num_written_tokens - 1])))
            shadow.touch(key)


def _continues(hashes: npt.NDArray[np.uint64], end: int, tail: _Tail) -> bool:
    """Whether the tokens of a partly filled block follow position `end` in a prompt."""
    last = end + tail.num_tokens - 1
    return last < hashes.size and int(hashes[last]) == tail.key


class QuotaShadows:
    """The shadows of all tenants with a ceiling of their own, on a separate thread.

    The engine's thread only puts requests into a queue, and takes the results. If more than 64 MiB of requests wait,
    further ones are left out; the first time, a warning is logged.

    Args:
        ceilings: ceiling of each tenant, in blocks.
        block_size: tokens per block.

    Attributes:
        num_dropped: requests that were left out.
    """

    def __init__(self, ceilings: Mapping[str, int], block_size: int) -> None:
        self.num_dropped = 0
        self._hashes = PrefixHashes()
        self._shadows = {tenant: QuotaShadow(ceiling, block_size) for tenant, ceiling in ceilings.items()}
        self._queue: queue.SimpleQueue[tuple[str, ShadowRequest] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the next two attributes
        self._num_waiting_bytes = 0
        self._num_saved_tokens: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="radixkv-quota-shadows", daemon=True)
        self._thread.start()

    def has(self, tenant: str) -> bool:
        """Whether a tenant has shadows."""
        return tenant in self._shadows

    def put(self, tenant: str, request: ShadowRequest) -> None:
        """Queue a request of a tenant that has shadows."""
        num_bytes = _num_bytes(request)
        with self._lock:
            if self._num_waiting_bytes and self._num_waiting_bytes + num_bytes > _MAX_WAITING_BYTES:
                self.num_dropped += 1
                is_first = self.num_dropped == 1
            else:
                is_first = False
                self._num_waiting_bytes += num_bytes
                self._queue.put((tenant, request))
        if is_first:
            _log.warning("statements: estimates of twice the ceiling leave out requests, because they are behind")

    def settle(self, ledger: TenantLedger) -> None:
        """Add the results since the last call to the ledger. For the engine's thread."""
        with self._lock:
            num_saved_tokens, self._num_saved_tokens = self._num_saved_tokens, Counter()
        for tenant, number in num_saved_tokens.items():
            ledger.count(tenant, {_LEDGER_FIELD: number})

    def close(self) -> None:
        """Replay the queued requests, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            tenant, request = item
            hashes = self._hashes.compute(request.tokens, request.seed)
            shadow = self._shadows[tenant]
            num_saved_tokens = shadow.replay(hashes, request.num_read_tokens, request.num_written_tokens)
            with self._lock:
                self._num_waiting_bytes -= _num_bytes(request)
                if num_saved_tokens:
                    self._num_saved_tokens[tenant] += num_saved_tokens


def _num_bytes(request: ShadowRequest) -> int:
    """Return the memory that a request takes in the queue."""
    return len(request.tokens) + _REQUEST_BYTES
