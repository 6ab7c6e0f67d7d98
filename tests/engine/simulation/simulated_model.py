"""An arithmetic model: its K/V are digests of the adapter and the token path, and its output depends on all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_64_intdigest

from radixkv.api.sampling import Sampling
from radixkv.cache.block_pool import BlockState
from radixkv.cache.lease import Lease
from radixkv.cache.prefix_cache import PrefixCache
from radixkv.compute.forward import Chunk, pack_tokens
from radixkv.compute.runner import Launch, StepResult, Wait
from radixkv.invocation import InvocationMarks, strip_marks
from radixkv.namespace import PUBLIC_TENANT, Namespace
from tests.adapter_doubles import FakeDevice
from tests.constraints import Rising
from tests.engine.reference_sampler import draw, penalize
from tests.fake_runner import with_tokens
from tests.fakes import FakeClock

VOCAB_SIZE = 256
_ID_BITS = 20
_MASK = 2**64 - 1
_random = np.random.default_rng(0)
_NUM_LOGIT_ROWS = 251
_LOGIT_ROWS = 3 * _random.standard_normal((2, _NUM_LOGIT_ROWS, VOCAB_SIZE), dtype=np.float32)
# What slots hold that a step has begun to write: 0 would mean that they were never written.
_SCRIBBLED, _SCRIBBLED_COPY = 666, 667

Content = npt.NDArray[np.uint64]


def chain(before: int, token_ids: Iterable[int]) -> Content:
    """Return the K/V of tokens after a token whose K/V are `before`."""
    content = []
    for token_id in token_ids:
        before = ((before ^ token_id) * 0x9E3779B97F4A7C15) & _MASK
        before ^= before >> 31
        content.append(before)
    return np.array(content, dtype=np.uint64)


@lru_cache(maxsize=20_000)
def content_of(namespace: Namespace, path: bytes) -> Content:
    """Return the K/V of a whole path; see `path_of`."""
    return chain(first_digest(namespace), np.frombuffer(path, dtype="<u4").tolist())


def path_of(tokens: bytes, invoked: str = "", start: int = 0) -> bytes:
    """Return tokens with a number in the upper bits for the adapter that computes each, without the marks of the cache.

    Args:
        tokens: token ids, without marks.
        invoked: the digest of the adapter that the tokens invoke; empty for none.
        start: position of the first token that it computes.
    """
    ids = np.frombuffer(tokens, "<u4").copy()
    if invoked:
        ids[start:] += np.uint32((1 + xxh3_64_intdigest(invoked.encode()) % 4000) << _ID_BITS)
    return ids.tobytes()


def path_in_tree(tokens: bytes, marks: InvocationMarks) -> bytes:
    """Return the path of tokens that have the cache's marks."""
    return path_of(strip_marks(tokens), marks.digest_of(tokens), marks.num_plain(tokens))


def first_digest(namespace: Namespace) -> int:
    """Return the digest before a first token. As in a real model, K/V do not depend on the tenant."""
    return xxh3_64_intdigest(repr((namespace.model, namespace.adapter)).encode())


def writer_of(namespace: Namespace) -> int:
    """Return a number for all writers of a namespace, independent of how the cache compares namespaces."""
    return xxh3_64_intdigest(repr(tuple(namespace._replace(public_prefix=""))).encode())


def logits_of(content: Content) -> npt.NDArray[np.float32]:
    """Return the logits after a path, float32 `[vocab_size]`. A single wrong slot changes them."""
    digest = xxh3_64_intdigest(content.tobytes())
    row: npt.NDArray[np.float32] = (
        _LOGIT_ROWS[0, digest % _NUM_LOGIT_ROWS] + _LOGIT_ROWS[1, (digest >> 32) % _NUM_LOGIT_ROWS]
    )
    return row


@lru_cache(maxsize=20_000)
def continuation(namespace: Namespace, prompt: bytes, sampling: Sampling) -> tuple[int, ...]:
    """Return the tokens generated after a prompt's path: up to a stop token, or the requested number."""
    path, token_ids = prompt, list[int]()
    adapter_mark = int.from_bytes(prompt[-4:], "little") >> _ID_BITS << _ID_BITS
    constraint = cast(Rising | None, sampling.constraint)
    matcher = None if constraint is None else constraint.start(sampling.stop_token_ids)
    while len(token_ids) < sampling.max_new_tokens and not set(token_ids[-1:]) & sampling.stop_token_ids:
        if matcher is not None and (matcher.is_finished or matcher.refuses):
            break
        row = torch.from_numpy(logits_of(content_of(namespace, path)))
        if sampling.changes_logits:
            prompt_ids = np.unique(np.frombuffer(strip_marks(prompt), dtype="<u4")).astype(np.int64)
            allowed = None if matcher is None else matcher.allowed()
            row = penalize(row, sampling, prompt_ids, token_ids, sampling.stop_token_ids, allowed)
        if sampling.temperature:
            token_ids.append(int(draw(row, sampling, position=len(path) // 4)))
        else:
            token_ids.append(int(row.argmax()))
        path += (token_ids[-1] + adapter_mark).to_bytes(4, "little")
        if matcher is not None:
            matcher.accept(token_ids[-1])
    return tuple(token_ids)


class DeviceLost(Exception):
    """A step failed, as the script demands."""


class Part(NamedTuple):
    """A chunk of a step, with the block table that its lease had when the step was prepared.

    Attributes:
        num_tokens: tokens of the lease at that time, plus one if the running step computes another.
    """

    chunk: Chunk
    lease: Lease
    num_tokens: int


class SimulatedRunner:
    """Computes chunks over slots of digests, which takes virtual time, and fails where the script demands.

    The engine takes exceptions of a runner for failed steps, so what is wrong is added to `violations` instead.

    Args:
        cache: says to whom each block belongs.
        clock: is advanced by each step.
        step_s, token_s: virtual seconds of a step, and of each of its tokens.
        failures: how a step fails, by its index: `before` it has done anything, `after` it has overwritten all slots
            that it writes with wrong values, with values that are `not finite` in one chunk, or because the device has
            `no memory` for it.
        during: called while a step computes, with the way it will fail, or None.

    Attributes:
        content: uint64 `[num_blocks, block_size]`; 0 where nothing was written.
        writers: uint64 `[num_blocks, block_size]`, who wrote each slot; see `writer_of`.
        leases: lists the leases of all chunks.
        device: the adapters on the device.
        num_steps: steps that were waited for, or that failed when they began.
        num_tokens: computed tokens.
        num_copies: copied blocks.
        num_prepared: steps that were prepared while another one was computed.
        num_ahead: the prepared steps that were started.
    """

    is_asynchronous = True
    device: FakeDevice

    def __init__(
        self,
        cache: PrefixCache,
        clock: FakeClock,
        step_s: float,
        token_s: float,
        failures: Mapping[int, str],
        on_compute: Callable[[Sequence[Part], str | None], None],
    ) -> None:
        self.model = SimpleNamespace(name="simulated", device=torch.device("cpu"))
        self.storage = SimpleNamespace(block_bytes=0, kv_dtype="uint64")
        self.content: Content = np.zeros((cache.pool.num_blocks, cache.block_size), dtype=np.uint64)
        self.writers = np.zeros_like(self.content)
        self.violations: list[str] = []
        self.leases: Callable[[], Iterable[Lease]] = lambda: cache.leases
        self.num_steps = 0
        self.num_tokens = 0
        self.num_copies = 0
        self.num_prepared = 0
        self.num_ahead = 0
        self._cache = cache
        self._clock = clock
        self._step_s, self._token_s = step_s, token_s
        self._failures = failures
        self._on_compute = on_compute
        self._is_running = False
        self._prepared: list[Part] = []

    def prepare(self, chunks: Sequence[Chunk]) -> Launch:
        """Record the current block tables. The step before may still run."""
        is_ahead = self._is_running
        parts = []
        for chunk in chunks:
            lease = self._lease_of(chunk)
            copied = dataclasses.replace(chunk, block_ids=chunk.block_ids.copy())
            parts.append(Part(copied, lease, lease.num_tokens + is_ahead))
        self._prepared = parts
        self.num_prepared += is_ahead

        def start(input_ids: torch.Tensor) -> Wait:
            self.num_ahead += is_ahead
            return self._start(parts, input_ids)

        return start

    def start(self, chunks: Sequence[Chunk]) -> Wait:
        return self.prepare(chunks)(pack_tokens(chunks))

    def _start(self, prepared: Sequence[Part], input_ids: torch.Tensor) -> Wait:
        """Begin a step. Until its result is awaited, the slots that it writes hold wrong values.

        Of the steps that fail `before` or with `no memory`, those with an odd index fail here, the others in the wait.
        """
        if self._is_running:
            self.violations.append("a step begins before the last one was waited for")
        if self._prepared is not prepared:
            self.violations.append("a step begins that has begun before, or after which another one was prepared")
        self._prepared = []
        chunks = with_tokens([part.chunk for part in prepared], input_ids)
        parts = [part._replace(chunk=chunk) for chunk, part in zip(chunks, prepared, strict=True)]
        self._verify_writes(parts)
        failure = self._failures.get(self.num_steps)
        if failure in ("before", "no memory") and self.num_steps % 2:
            return self._finish(parts, failure)
        for chunk in chunks:
            if chunk.copy is not None:
                self.content[chunk.copy.target] = _SCRIBBLED_COPY
            self._scribble(chunk)
        self._is_running = True
        return lambda: self._finish(parts, failure)

    def run(self, chunks: Sequence[Chunk]) -> StepResult:
        return self.start(chunks)()

    def _finish(self, parts: Sequence[Part], failure: str | None) -> StepResult:
        """Compute the step that was begun."""
        self._is_running = False
        self.num_steps += 1
        chunks = [part.chunk for part in parts]
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        self._clock.now_s += self._step_s + self._token_s * num_tokens
        if failure != "before":
            self._compute(parts, scribbles=failure in ("after", "no memory"))
        self._on_compute(parts, failure)
        if failure in ("before", "after"):
            raise DeviceLost(f"step {self.num_steps - 1}")
        if failure == "no memory":
            raise torch.OutOfMemoryError
        self.num_tokens += num_tokens
        rows_by_chunk = []
        for chunk in chunks:
            ends = range(chunk.end - chunk.num_logit_rows + 1, chunk.end + 1)
            rows_by_chunk.append([logits_of(self.read(chunk.block_ids, end)) for end in ends])
        is_finite = [True] * len(chunks)
        if failure == "not finite":
            broken_index = index_of_broken_part(parts)
            is_finite[broken_index] = False
            num_rows = len(rows_by_chunk[broken_index])
            rows_by_chunk[broken_index] = [np.full(VOCAB_SIZE, np.nan, dtype=np.float32)] * num_rows
            self._scribble(chunks[broken_index])
        rows = [row for chunk_rows in rows_by_chunk for row in chunk_rows]
        logits = torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, VOCAB_SIZE)
        return StepResult(logits, logits.argmax(dim=-1).tolist(), is_finite)

    def read(self, block_ids: npt.NDArray[np.int32], num_tokens: int) -> Content:
        """Return the first slots of a block table."""
        return self.content[self._first_blocks(block_ids, num_tokens)].ravel()[:num_tokens]

    def _first_blocks(self, block_ids: npt.NDArray[np.int32], num_tokens: int) -> npt.NDArray[np.int32]:
        return block_ids[: -(-num_tokens // self._cache.block_size)]

    def _lease_of(self, chunk: Chunk) -> Lease:
        """Find the lease of a chunk by its block table: chunks know no namespace."""
        return next(lease for lease in self.leases() if np.array_equal(lease.block_ids, chunk.block_ids))

    def _compute(self, parts: Sequence[Part], *, scribbles: bool) -> None:
        for chunk, *_ in parts:
            if chunk.copy is not None:
                self.content[chunk.copy.target] = self.content[chunk.copy.source]
                self.writers[chunk.copy.target] = self.writers[chunk.copy.source]
                self.num_copies += 1
        for chunk, lease, _ in parts:
            namespace, marks, cached_tokens = lease.namespace, self._cache.marks, bytes(lease.tokens)
            adapter = namespace.adapter or marks.digest_of(cached_tokens)
            if chunk.adapter != adapter or (chunk.adapter and chunk.adapter not in self.device.held):
                self.violations.append("a chunk is computed with another adapter, or with one that is gone")
            if adapter != namespace.adapter and chunk.adapter_from != marks.num_plain(cached_tokens):
                self.violations.append("an adapter is invoked in another place")
            cached = self.read(chunk.block_ids, chunk.start)
            path = path_of(chunk.tokens, "" if namespace.adapter else chunk.adapter, chunk.adapter_from)
            expected = content_of(namespace, path)[: chunk.start]
            for position in np.flatnonzero(cached != expected)[:1].tolist():
                self.violations.append(f"position {position} of [0, {chunk.start}) holds another prefix's K/V")
            self.verify_writers(chunk.block_ids, chunk.start, namespace)
            last_digest = int(cached[-1]) if chunk.start else first_digest(namespace)
            token_ids = np.frombuffer(path, dtype="<u4")[chunk.start : chunk.end]
            self._write(chunk, chain(last_digest, token_ids.tolist()), writer_of(namespace))
        if scribbles:
            for chunk, *_ in parts:
                self._scribble(chunk)

    def verify_writers(self, block_ids: npt.NDArray[np.int32], num_tokens: int, namespace: Namespace) -> None:
        """Check that an operator wrote the public tokens that a request reuses, and its own namespace the others.

        public prefix [ whole blocks .... | the beginning of another block ]
        own                               [ a copy of it, continued ...... | ... ]
        """
        own = writer_of(namespace)
        serial, _, _ = namespace.public_prefix.partition(":")
        root_tokens = namespace.public_prefix_tokens
        public = writer_of(namespace._replace(tenant=PUBLIC_TENANT, salt=serial)) if root_tokens else own
        written = self.writers[self._first_blocks(block_ids, num_tokens)].ravel()[:num_tokens]
        copied_end = root_tokens + self._cache.block_size
        is_right = (
            bool((written[:root_tokens] == public).all())
            and set(written[root_tokens:copied_end].tolist()) <= {own, public}
            and bool((written[copied_end:] == own).all())
        )
        if not is_right:
            self.violations.append("a request reuses tokens that another tenant wrote")

    def _write(self, chunk: Chunk, content: Content | int, writer: int) -> None:
        positions = np.arange(chunk.start, chunk.end)
        blocks, offsets = np.divmod(positions, self._cache.block_size)
        self.content[chunk.block_ids[blocks], offsets] = content
        self.writers[chunk.block_ids[blocks], offsets] = writer

    def _scribble(self, chunk: Chunk) -> None:
        self._write(chunk, _SCRIBBLED, 0)

    def _verify_writes(self, parts: Sequence[Part]) -> None:
        """Check that each block is written by its own lease only, and that no block is copied while it is written."""
        states = self._cache.pool.states()
        written_by_part = [self._blocks_to_write(part.chunk) for part in parts]
        all_written = [block_id for block_ids in written_by_part for block_id in block_ids]
        if len(set(all_written)) < len(all_written):
            self.violations.append("two chunks of a step write the same block")
        for (chunk, lease, num_tokens), block_ids in zip(parts, written_by_part, strict=True):
            if any(states[block_id] != BlockState.LEASED for block_id in block_ids):
                self.violations.append("a step writes a block that is free or published")
            if chunk.start // self._cache.block_size < lease.num_published_blocks:
                self.violations.append("a lease writes a block that belongs to the tree")
            if not 0 <= chunk.start < chunk.end <= num_tokens:
                self.violations.append(f"a chunk [{chunk.start}, {chunk.end}) of {num_tokens} tokens")
            if not np.array_equal(chunk.block_ids, lease.block_ids) or lease.is_closed:
                self.violations.append("a step begins with a block table that is not that of the lease any more")
            if chunk.copy is not None and chunk.copy.source in all_written:
                self.violations.append("a block is copied that the same step writes")
            if chunk.copy is not None and states[chunk.copy.source] == BlockState.FREE:
                self.violations.append("a block is copied that is free")

    def _blocks_to_write(self, chunk: Chunk) -> list[int]:
        block_size = self._cache.block_size
        block_ids: list[int] = chunk.block_ids[chunk.start // block_size : -(-chunk.end // block_size)].tolist()
        if chunk.copy is not None and chunk.copy.target not in block_ids:
            block_ids.append(chunk.copy.target)
        return block_ids


def index_of_broken_part(parts: Sequence[Part]) -> int:
    """Return the index of the part of a step whose values are not finite if the step fails in this way."""
    return len(parts) // 2
