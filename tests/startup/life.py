"""One run of an engine with host memory and a disk tier, in a process that may be killed at any moment.

The process reports what it does through a pipe, one line at a time, so lines that were written before a kill arrive.
"""

from __future__ import annotations

import logging
import os
import pickle
import random
import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from radixkv.api.caller import Caller
from radixkv.api.params import PrefillParams
from radixkv.api.sampling import Sampling
from radixkv.config import Config
from radixkv.engine.engine import Engine
from radixkv.offload.tiers.block_store import Loan
from radixkv.offload.tiers.disk import DiskStore
from radixkv.offload.tiers.host import HostStore
from radixkv.startup.build_engine import build_engine
from tests.model.exact.checkpoints import CONFIGS, VOCAB_SIZE, write_checkpoint
from tests.patience import PATIENCE_S, wait_until

BLOCK_SIZE, POOL_BLOCKS, HOST_BLOCKS, DISK_BLOCKS = 16, 20, 30, 100
BLOCK_BYTES = 12_288  # float32 K and V of 16 tokens, three layers, two heads of 16 numbers
CALLERS = (Caller("acme"), Caller("acme", salt="apart"), Caller("globex"))
NUM_QUESTIONS = 3  # per document
MAX_OPEN_CALLS = 4
CANCELLED_SHARE = 0.05  # of requests
PURGED_SHARE = 0.25  # of lives, which purge what is cached of one caller


@dataclass(frozen=True)
class Case:
    """A request, and the answer of an engine that computes it alone, with nothing cached.

    Attributes:
        tokens: the prompt.
        sampling: parameters of a generation; None for a prefill, whose answer is its logits.
        digest: digest of the right answer; empty before `prepare` has computed it.
    """

    caller: Caller
    tokens: bytes
    sampling: Sampling | None
    digest: str = ""


class Pipe:
    """The pipe through which a life reports to the campaign."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write_line(self, *words: object) -> None:
        """Write words as one line, atomically."""
        os.write(self._descriptor, (" ".join(map(str, words)) + "\n").encode())


def config(folder: Path, *, has_tiers: bool) -> Config:
    """Return the settings of a life in a folder, whose pool holds a small part of all prompts."""
    settings = [f"model.path={folder / 'model'}", "model.device=cpu", f"cache.block_size={BLOCK_SIZE}"]
    settings.append(f"cache.capacity_tokens={POOL_BLOCKS * BLOCK_SIZE}")
    if has_tiers:
        settings.append(f"tiers.host_bytes={HOST_BLOCKS * (BLOCK_BYTES + 1024)}")
        settings += [f"tiers.disk_path={folder / 'disk'}", f"tiers.disk_bytes={DISK_BLOCKS * (BLOCK_BYTES + 4096)}"]
    return Config.load(None, settings)


def prepare(folder: Path, seed: int) -> None:
    """Write a checkpoint, and cases with the answers of an engine without tiers that reuses nothing."""
    write_checkpoint(CONFIGS["llama"], folder / "model")
    engine = build_engine(config(folder, has_tiers=False))
    engine.start()
    cases = []
    for case in _first_turns(random.Random(seed)):
        answered_case, answer = _answer_alone(engine, case)
        cases.append(answered_case)
        if case.sampling is not None:
            # The next turn consists of this prompt, its answer, and a question of seven tokens.
            next_turn = replace(case, tokens=case.tokens + answer + case.tokens[: 7 * 4])
            cases.append(_answer_alone(engine, next_turn)[0])
    engine.stop()
    (folder / "cases").write_bytes(pickle.dumps(cases))


def read_cases(folder: Path) -> list[Case]:
    """Return the cases that `prepare` wrote."""
    cases: list[Case] = pickle.loads((folder / "cases").read_bytes())
    return cases


def live(folder: Path, cases: list[Case], num_requests: int, purged: set[int], seed: int, pipe: Pipe) -> None:
    """Start an engine, serve, purge in some lives, check that nothing leaks, and stop. Raises if anything is wrong.

    Args:
        num_requests: number of requests to serve.
        purged: indices in `CALLERS` of the callers whose prompts were purged, and not sent again since then.
    """
    torch.set_num_threads(1)
    rng, loans = random.Random(seed), OpenLoans()
    _report_disk(pipe)
    engine = build_engine(config(folder, has_tiers=True))
    assert engine.offload is not None
    assert set(engine.offload.tiers) == {"host", "disk"}
    engine.start()
    pipe.write_line("ready")
    if purged or rng.random() < 0.5:  # otherwise the engine serves while it scans the disk
        engine.purge(tenant="unknown").result(PATIENCE_S)  # completes after the scan
    for number in sorted(purged):
        _require_nothing_cached(engine, cases, CALLERS[number])
        pipe.write_line("verified", number)  # the purge of this caller
    _serve(engine, cases, rng.choices(range(len(cases)), k=num_requests), rng, pipe)
    pipe.write_line("served")
    if rng.random() < PURGED_SHARE:
        number = rng.randrange(len(CALLERS))
        caller = CALLERS[number]
        engine.purge(tenant=caller.tenant, salt=caller.salt).result(PATIENCE_S)
        pipe.write_line("purged", number)
    _check_nothing_leaks(engine, loans)
    pipe.write_line("checked")
    engine.stop()
    assert not engine.is_alive
    pipe.write_line("stopped")


class OpenLoans:
    """Counts the loans of host memory and disk that are not returned yet."""

    def __init__(self) -> None:
        self.num_open = 0
        self._lock = threading.RLock()  # a loan may end in the middle of a call of this thread
        for store in (HostStore, DiskStore):
            store.get = self._count_loans_of(store.get)  # type: ignore[method-assign]

    def _count_loans_of(self, get: Any) -> Any:
        def counting_get(store: object, keys: object) -> list[Loan | None]:
            lent = get(store, keys)
            self._add(sum(loan is not None for loan in lent))
            return [None if loan is None else Loan(loan.data, partial(self._end, loan)) for loan in lent]

        return counting_get

    def _end(self, loan: Loan) -> None:
        loan.release()
        self._add(-1)

    def _add(self, number: int) -> None:
        with self._lock:
            self.num_open += number


def _first_turns(rng: random.Random) -> list[Case]:
    """Draw prompts of all callers that begin with a document or a part of one."""
    token_rng = np.random.default_rng(rng.getrandbits(32))
    documents = [token_rng.integers(0, VOCAB_SIZE, length) for length in (48, 83, 112, 144)]
    cases = []
    for document in documents:
        for number in range(NUM_QUESTIONS):
            prefix_length = len(document) if rng.random() < 0.7 else rng.randrange(20, len(document))
            question = token_rng.integers(0, VOCAB_SIZE, rng.randrange(1, 30))
            tokens = np.concatenate((document[:prefix_length], question)).astype("<u4").tobytes()
            sampling = Sampling(rng.randrange(2, 24), temperature=0.8 * (number % 2), seed=number, ignore_eos=True)
            cases += [Case(caller, tokens, sampling if number else None) for caller in CALLERS]
    return cases


def _answer_alone(engine: Engine, case: Case) -> tuple[Case, bytes]:
    """Compute a case without the cache. Returns the case with the digest of its answer, and the answer."""
    params = PrefillParams(case.tokens, case.caller, read_cache=False, write_cache=False)
    answer = _bytes_of(_send(engine, case, params).result(PATIENCE_S))
    return replace(case, digest=_digest(answer)), answer


def _send(engine: Engine, case: Case, params: PrefillParams) -> Future[Any]:
    if case.sampling is None:
        return engine.prefill(replace(params, return_logits=True))
    return engine.generate(params, case.sampling, lambda _: None)


def _bytes_of(result: Any) -> bytes:
    """Return the logits of a prefill, or the token ids of a generation."""
    if hasattr(result, "logits"):
        return bytes(result.logits.tobytes())
    return np.asarray(result.token_ids).astype("<u4").tobytes()


def _digest(answer: bytes) -> str:
    return blake2b(answer, digest_size=16).hexdigest()


def _serve(engine: Engine, cases: list[Case], order: list[int], rng: random.Random, pipe: Pipe) -> None:
    """Send requests, of which at most `MAX_OPEN_CALLS` are open; report each answer and the source of its tokens."""
    open_calls: deque[tuple[int, Future[Any]]] = deque()

    def end_oldest_call() -> None:
        number, future = open_calls.popleft()
        if future.cancelled():
            return
        result = future.result(PATIENCE_S)
        usage = result.usage
        pipe.write_line("answer", number, _digest(_bytes_of(result)), usage.host_tokens, usage.disk_tokens)

    for number in order:
        case = cases[number]
        future = _send(engine, case, PrefillParams(case.tokens, case.caller))
        open_calls.append((number, future))
        if rng.random() < CANCELLED_SHARE:
            future.cancel()
        if len(open_calls) == MAX_OPEN_CALLS:
            end_oldest_call()
    while open_calls:
        end_oldest_call()


def _require_nothing_cached(engine: Engine, cases: list[Case], caller: Caller) -> None:
    """Check that nothing of the prompts of a caller is cached on the device or in a tier. Nothing is published."""
    for case in cases:
        if case.caller == caller:
            params = PrefillParams(case.tokens, caller, write_cache=False)
            assert engine.prefill(params).result(PATIENCE_S).usage.cached_tokens == 0, "purged tokens are cached"


def _check_nothing_leaks(engine: Engine, loans: OpenLoans) -> None:
    """Check every invariant, and that all blocks are free or published and all loans returned."""

    def is_idle() -> bool:  # cancelled requests end after the step that computes them
        requests = engine.load().result(PATIENCE_S).requests
        return requests.running == requests.waiting == requests.following == 0

    wait_until(is_idle)
    engine.check().result(PATIENCE_S)
    blocks = engine.load().result(PATIENCE_S).blocks
    assert blocks.leased == blocks.pinned == 0, f"blocks: expected none in use, got {blocks}"
    assert blocks.free + blocks.published == blocks.total, f"blocks: expected free or published ones, got {blocks}"
    wait_until(lambda: loans.num_open == 0)


def _report_disk(pipe: Pipe) -> None:
    """Report when the disk was opened, and what it contained, as the log does."""

    class DiskReporter(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg.startswith("tier %s has room") and record.args[0] == "disk":  # type: ignore[index]
                pipe.write_line("opened")
            if record.msg.startswith("found %d blocks on disk"):
                pipe.write_line("found", record.args[0], record.args[2])  # type: ignore[index]

    logger = logging.getLogger("radixkv")
    logger.setLevel(logging.INFO)
    logger.addHandler(DiskReporter())
