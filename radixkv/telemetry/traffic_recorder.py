"""Records the traffic of a server as a trace for `radixkv simulate`, without tokens, texts or names."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, NamedTuple

from radixkv.api.awaits import Awaits
from radixkv.config import Config
from radixkv.engine.observer import Observer
from radixkv.errors import ConfigError
from radixkv.scheduling.request import Outcome, Request
from radixkv.tokens import TOKEN_BYTES

_KEY_FILE = "key"
_KEY_BYTES = 32
_ID_BYTES = 8
_NUM_FILES = 8  # maximum number of files, which share `max_bytes`
_NUM_DIGITS = 8  # in the names of files
_MAX_WAITING_BYTES = 64 * 2**20  # tokens of requests that wait to be written
_WARNING_PERIOD_S = 60.0
_STOPS = {Awaits.TOOL: "tool_use", Awaits.USER: "end_turn"}

_logger = logging.getLogger(__name__)


class _EndedRequest(NamedTuple):
    """A request that has ended.

    Attributes:
        received_s: Unix time of its arrival.
        owner: model, tenant, adapter and salt.
        tokens: prompt and generated tokens, little-endian uint32 bytes.
        num_prompt_tokens: length of its prompt.
        cached_tokens: prompt tokens that it reused.
        loaded_tokens: those of them that were loaded after it arrived, by tier.
        ttft_s: seconds from its arrival to its first token.
        session_id: its session; empty for none.
        stop: why its answer ended.
        is_last: whether its session has ended with it.
    """

    received_s: float
    owner: tuple[str, ...]
    tokens: bytes
    num_prompt_tokens: int
    cached_tokens: int
    loaded_tokens: Mapping[str, int]
    ttft_s: float
    session_id: str
    stop: str
    is_last: bool


class TrafficRecorder(Observer):
    """Writes a line of JSON for each request that finished, in the format of Mooncake's traces with further fields.

    {"timestamp": 1764288000123, "input_length": 700, "output_length": 52, "hash_ids": [17, 4], "output_hash_ids": [9],
     "cached_length": 64, "loaded_lengths": {"host": 64}, "ttft_ms": 41.7, "tenant": "3f..", "session": "a1..",
     "stop": "tool_use"}

    Ids are hashes with a secret key, of the namespace and all tokens up to the end of a block. The key is in a file
    of the directory with mode 0600. Without the key, ids reveal neither tokens nor whether a guessed prompt
    occurred. `output_hash_ids` are the ids of the blocks that contain generated tokens. If the first of these also
    contains the end of the prompt, the last id of `hash_ids` is a hash of the prompt alone.

    The engine's thread only puts a request into a queue; a thread of the recorder hashes and writes. If requests with
    more than 64 MiB of tokens wait, further ones are left out, and a warning is logged.

    Args:
        directory: created if it does not exist. Files of earlier processes in it count towards `max_bytes`.
        max_bytes: maximum size of all files; the oldest ones are deleted.
        block_size: tokens per id.
        clock: the Unix time in seconds.

    Attributes:
        num_dropped: requests that were left out.

    Raises:
        ConfigError: the directory cannot be written, or its key has another size.
    """

    def __init__(
        self, directory: str | Path, max_bytes: int, block_size: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.num_dropped = 0
        self._directory = Path(directory)
        self._max_file_bytes = max(1, max_bytes // _NUM_FILES)
        self._block_bytes = block_size * TOKEN_BYTES
        self._clock = clock
        self._queue: queue.SimpleQueue[_EndedRequest | None] = queue.SimpleQueue()
        self._num_waiting_bytes = 0
        self._lock = threading.Lock()
        self._warned_s: float | None = None  # time of the last warning
        self._file: IO[str] | None = None
        self._num_file_bytes = 0
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._key = _load_or_create_key(self._directory)
            self._open_next()
        except OSError as error:
            raise ConfigError(
                f"server.record_path: expected a directory that can be written, got {directory}: {error.strerror}"
            ) from error
        self._thread = threading.Thread(target=self._run, name="radixkv-recorder", daemon=True)
        self._thread.start()

    def request_ended(self, request: Request, outcome: Outcome, error: Exception | None, now_s: float) -> None:
        """Queue a request that finished."""
        if outcome is not Outcome.FINISHED:
            return
        num_bytes = request.num_tokens * TOKEN_BYTES
        with self._lock:
            is_behind = self._num_waiting_bytes + num_bytes > _MAX_WAITING_BYTES and self._num_waiting_bytes > 0
            if not is_behind:
                self._num_waiting_bytes += num_bytes
        if is_behind:
            self._drop(now_s)
            return
        namespace = request.namespace
        owner = (namespace.model, namespace.tenant, request.adapter, namespace.salt)
        awaits = request.awaits
        received_s = self._clock() - max(0.0, now_s - request.times.received_s)
        prefilled_s = request.times.prefilled_s
        assert prefilled_s is not None, "a request finishes after its first token"
        self._queue.put(
            _EndedRequest(
                received_s,
                owner,
                request.tokens,
                request.num_prompt_tokens,
                request.reuse.cached_tokens,
                request.reuse.loaded_tokens,
                prefilled_s - request.times.received_s,
                request.params.session_id,
                _STOPS.get(awaits, "other"),
                awaits is Awaits.NOTHING,
            )
        )

    def close(self) -> None:
        """Write what is queued, and close the file."""
        self._queue.put(None)
        self._thread.join()

    def _drop(self, now_s: float) -> None:
        self.num_dropped += 1
        if self._warned_s is None or now_s - self._warned_s >= _WARNING_PERIOD_S:
            self._warned_s = now_s
            _logger.warning("recording: behind the traffic, %d requests were left out so far", self.num_dropped)

    def _run(self) -> None:
        while (ended := self._queue.get()) is not None:
            try:
                self._write(self._line(ended))
            except OSError as error:
                self._drop(time.monotonic())
                _logger.debug("recording: a line could not be written: %s", error)
            finally:
                with self._lock:
                    self._num_waiting_bytes -= len(ended.tokens)
        if self._file is not None:
            self._file.close()

    def _line(self, ended: _EndedRequest) -> str:
        prefix_digest = self._digest(b"namespace", "\0".join(f"{len(name)}:{name}" for name in ended.owner).encode())
        digests = []
        num_prompt_bytes = ended.num_prompt_tokens * TOKEN_BYTES
        for start in range(0, len(ended.tokens), self._block_bytes):
            block = ended.tokens[start : start + self._block_bytes]
            if start < num_prompt_bytes < start + len(block):  # the prompt ends inside of this block
                digests.append(self._digest(prefix_digest, block[: num_prompt_bytes - start]))
                num_prompt_ids = len(digests)
            prefix_digest = self._digest(prefix_digest, block)
            digests.append(prefix_digest)
            if start + len(block) == num_prompt_bytes:
                num_prompt_ids = len(digests)
        ids = [int.from_bytes(digest, "little") for digest in digests]
        fields = {
            "timestamp": round(ended.received_s * 1000),
            "input_length": ended.num_prompt_tokens,
            "output_length": len(ended.tokens) // TOKEN_BYTES - ended.num_prompt_tokens,
            "hash_ids": ids[:num_prompt_ids],
            "output_hash_ids": ids[num_prompt_ids:],
            "cached_length": ended.cached_tokens,
            "loaded_lengths": {tier: num_tokens for tier, num_tokens in ended.loaded_tokens.items() if num_tokens},
            "ttft_ms": round(ended.ttft_s * 1000, 3),
            "tenant": self._digest(b"tenant", ended.owner[1].encode()).hex(),
            "session": self._session_id(ended),
            "stop": ended.stop,
        }
        if ended.is_last:
            fields["last"] = True
        return json.dumps(fields, separators=(",", ":")) + "\n"

    def _session_id(self, ended: _EndedRequest) -> str:
        tenant = ended.owner[1].encode()
        name = len(tenant).to_bytes(4, "little") + tenant + ended.session_id.encode()
        return self._digest(b"session", name).hex() if ended.session_id else ""

    def _digest(self, context: bytes, content: bytes) -> bytes:
        """Return the keyed hash of a content; contexts with different first 16 bytes have different hashes."""
        digest = hashlib.blake2b(key=self._key, digest_size=_ID_BYTES, person=context[:16])
        digest.update(content)
        return digest.digest()

    def _write(self, line: str) -> None:
        if self._file is None or self._num_file_bytes + len(line) > self._max_file_bytes:
            self._open_next()
        assert self._file is not None
        self._file.write(line)
        self._num_file_bytes += len(line)
        if self._queue.empty():
            self._file.flush()

    def _open_next(self) -> None:
        """Begin a new file, and delete the oldest files if there are more than `_NUM_FILES`."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._num_file_bytes = 0
        files = sorted(self._directory.glob(f"traffic-{'[0-9]' * _NUM_DIGITS}.jsonl"))
        for old_file in files[: max(0, len(files) - _NUM_FILES + 1)]:
            with contextlib.suppress(FileNotFoundError):
                old_file.unlink()
        number = int(files[-1].stem.rpartition("-")[2]) + 1 if files else 1
        path = self._directory / f"traffic-{number:0{_NUM_DIGITS}d}.jsonl"
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii")


@contextlib.contextmanager
def recorded_traffic(config: Config) -> Iterator[TrafficRecorder | None]:
    """Record the traffic of a server while the context lasts, if `server.record_path` is set."""
    path = config.server.record_path
    if path is None:
        yield None
        return
    recorder = TrafficRecorder(path, config.server.record_bytes, config.cache.block_size)
    _logger.info("recording traffic in %s, at most %d bytes", path, config.server.record_bytes)
    try:
        yield recorder
    finally:
        recorder.close()


def _load_or_create_key(directory: Path) -> bytes:
    """Return the key of a directory, which is created if there is none."""
    path = directory / _KEY_FILE
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(_KEY_BYTES))
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"server.record_path: expected a key of {_KEY_BYTES} bytes in {path}, got {len(key)}")
    return key
