"""Store in Redis or Valkey, which servers of the same model share."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, RedisError
from redis.retry import Retry

from radixkv.errors import ConfigError, StoreUnavailable
from radixkv.offload.block_keys import KeyScope
from radixkv.offload.tiers.block_object import HEAD_BYTES, BlockObject, read_head
from radixkv.offload.tiers.block_store import Loan, PutOutcome, PutResult, StoreBackend, StoreSize

_T = TypeVar("_T")
_BATCH_BYTES = 16 << 20  # per batch; the server buffers this much of a reply, and this process as much of a put
_SCAN_COUNT = 1000
_TOUCHED_AT_ONCE = 1000
_PREFIX = b"radixkv:1:"
_OTHER_REPLY_BYTES = 1 << 20  # of a scan, or of a thousand touches
DEFAULT_TTL_S = 86_400.0


class RedisStore(StoreBackend):
    """Objects under `radixkv:1:KEY` with a time to live, which `put`, `get` and `touch` renew.

    The server limits the memory and evicts: set `maxmemory` and `maxmemory-policy allkeys-lru`. The client connects at
    the first call, and reconnects at the first call after a failure. No call is retried.

    Args:
        url: `redis://[USER:PASSWORD@]HOST:PORT/DB`, `rediss://` for TLS, or `unix://PATH`.
        object_bytes: size of the largest object.
        ttl_s: time after which an unused object expires.
        timeout_s: for connecting, for each wait for bytes, and for all replies to a pipeline together.
        purge_timeout_s: for all replies of a purge together, since a server may send replies to a scan endlessly.

    Raises:
        ConfigError: the URL is invalid.
    """

    def __init__(
        self,
        url: str,
        object_bytes: int,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        timeout_s: float = 2.0,
        purge_timeout_s: float = 60.0,
    ) -> None:
        self._purge_timeout_s = purge_timeout_s
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._max_batch_objects = max(1, _BATCH_BYTES // object_bytes)
        self._object_bytes = object_bytes
        try:
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0)
            )
        except ValueError as error:  # its message may contain the password
            raise ConfigError("tiers.redis_url: expected redis://HOST:PORT/DB, got something else") from error
        max_reply_bytes = max(_BATCH_BYTES, object_bytes) + _OTHER_REPLY_BYTES
        pool = self._client.connection_pool
        pool.connection_class = _bounded_class(pool.connection_class, timeout_s, max_reply_bytes)

    def put(self, objects: Sequence[BlockObject], victims: Sequence[bytes] = ()) -> PutResult:
        """Store objects in pipelines, except those that are stored already. Redis evicts, and ignores `victims`."""
        outcomes: list[PutOutcome] = []
        for batch in self._batches(objects):
            outcomes += self._run(partial(self._put, batch))
        return PutResult(tuple(outcomes))

    def get(self, keys: Sequence[bytes]) -> list[Loan | None]:
        """Return objects, and renew their time to live."""
        values: list[bytes | None] = []
        for batch in self._batches(keys):
            values += self._run(partial(self._get, batch))
        return [None if data is None else Loan(memoryview(data)) for data in values]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether there is an object under each key. Does not count as a use."""
        return [bool(answer) for answer in self._run(lambda: self._pipelined("EXISTS", keys))]

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Renew the time to live of objects, which Redis also counts as a use, unlike `EXISTS`."""
        answers: list[int] = []
        for start in range(0, len(keys), _TOUCHED_AT_ONCE):
            batch = keys[start : start + _TOUCHED_AT_ONCE]
            answers += self._run(partial(self._pipelined, "PEXPIRE", batch, self._ttl_ms))
        return [bool(answer) for answer in answers]

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete objects, for all servers."""
        return sum(self._run(lambda: self._pipelined("UNLINK", keys)))

    def purge(self, scope: KeyScope) -> int:
        """Delete all objects whose keys are in a scope, for all servers.

        Complexity: O(keys in the whole database). Scans a thousand keys at a time, so that Redis serves other clients.

        Raises:
            StoreUnavailable: the server does not answer, or the scan does not end in time.
        """
        end_s = time.monotonic() + self._purge_timeout_s
        pattern = _PREFIX + scope.hex_pattern("?").encode() + b"*"
        cursor = 0
        num_deleted = 0
        while True:
            scan = partial(self._client.execute_command, "SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
            cursor, names = self._run(scan)
            if names:
                num_deleted += self._run(partial(self._client.execute_command, "UNLINK", *names))
            if not int(cursor):
                return num_deleted
            if time.monotonic() >= end_s:
                raise StoreUnavailable(f"tiers.redis_url: SCAN did not end within {self._purge_timeout_s:g} s")

    def size(self) -> StoreSize:
        """Return unknown sizes: only the server knows them."""
        return StoreSize(None, None, None)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _put(self, objects: Sequence[BlockObject]) -> list[PutOutcome]:
        pipeline = self._client.pipeline(transaction=False)
        for each in objects:
            pipeline.execute_command("GETRANGE", _name(each.key), 0, HEAD_BYTES - 1)
        heads = [_bytes_of(answer) for answer in pipeline.execute(raise_on_error=False)]
        pipeline = self._client.pipeline(transaction=False)
        is_sent = []
        for each, data in zip(objects, heads, strict=True):
            head = read_head(data)
            is_there = head is not None and head.key == each.key and head.generation >= each.generation
            is_sent.append(not is_there and each.num_bytes <= self._object_bytes)
            if is_there:
                pipeline.execute_command("PEXPIRE", _name(each.key), self._ttl_ms)
            elif each.num_bytes <= self._object_bytes:
                pipeline.execute_command("SET", _name(each.key), b"".join(each.pieces()), "PX", self._ttl_ms)
            else:
                pipeline.execute_command("EXISTS", _name(each.key))
        answers = pipeline.execute(raise_on_error=False)
        return [self._outcome(*each) for each in zip(objects, is_sent, answers, strict=True)]

    def _outcome(self, block_object: BlockObject, is_sent: bool, answer: object) -> PutOutcome:
        if isinstance(answer, OutOfMemoryError):
            return PutOutcome.NO_ROOM
        if isinstance(answer, RedisError):
            raise answer
        if is_sent:
            return PutOutcome.STORED
        return PutOutcome.TOO_LARGE if block_object.num_bytes > self._object_bytes else PutOutcome.ALREADY_THERE

    def _get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        values: list[bytes | None]
        try:
            values = self._client.execute_command("MGET", *map(_name, keys))
        except RedisError as error:
            if not isinstance(error.__context__, _ReplyTooLarge):
                raise
            values = self._get_beginnings(keys)
        stored_keys = [key for key, data in zip(keys, values, strict=True) if data is not None]
        if stored_keys:
            self._pipelined("PEXPIRE", stored_keys, self._ttl_ms)
        return values

    def _get_beginnings(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Read the beginnings of values, of which some are larger than any object, since others have written them.

        At most one byte more than the largest object has is read of each. `MGET` is twice as fast, but has no limit.
        """
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.execute_command("GETRANGE", _name(key), 0, self._object_bytes)
        return [_bytes_of(answer) or None for answer in pipeline.execute(raise_on_error=False)]

    def _pipelined(self, command: str, keys: Sequence[bytes], *arguments: int) -> list[Any]:
        if not keys:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.execute_command(command, _name(key), *arguments)
        answers: list[Any] = pipeline.execute()
        return answers

    def _batches(self, items: Sequence[_T]) -> Iterator[Sequence[_T]]:
        return (
            items[start : start + self._max_batch_objects] for start in range(0, len(items), self._max_batch_objects)
        )

    def _run(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except (RedisError, OSError) as error:  # some messages contain the URL
            raise StoreUnavailable(f"tiers.redis_url: expected an answer, got {type(error).__name__}") from error


class _ReplyTooLarge(OSError):
    """A reply has more bytes than any should have."""


class _BoundedSocket:
    """A socket on which all replies to one request, or pipeline, take a bounded time and number of bytes.

    The time limit of a socket starts again with each byte, and a server may send bytes without end.

    Args:
        connection: the socket.
        limit_s: time for these replies, from the end of the request; checked whenever bytes are received.
        max_bytes: maximum number of bytes that are received until more is sent.
    """

    def __init__(self, connection: Any, limit_s: float, max_bytes: int) -> None:
        self._connection = connection
        self._limit_s = limit_s
        self._max_bytes = max_bytes
        self._restart_limits()

    def sendall(self, data: bytes) -> None:
        """Send a request, or a part of it."""
        self._connection.sendall(data)
        self._restart_limits()

    def recv(self, num_bytes: int, flags: int = 0) -> bytes:
        """Receive a part of the reply. Raises OSError beyond the limits. Bytes that flags only peek at do not count."""
        data: bytes = self._connection.recv(num_bytes, flags)
        if not flags:
            self._count_received(len(data))
        return data

    def recv_into(self, buffer: bytearray, *sizes: int) -> int:
        """Receive a part of the reply into a buffer; see `recv`."""
        number: int = self._connection.recv_into(buffer, *sizes)
        self._count_received(number)
        return number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def _restart_limits(self) -> None:
        self._end_s = time.monotonic() + self._limit_s
        self._num_bytes_left = self._max_bytes

    def _count_received(self, num_bytes: int) -> None:
        self._num_bytes_left -= num_bytes
        if self._num_bytes_left < 0:
            raise _ReplyTooLarge(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
        if time.monotonic() > self._end_s:
            raise OSError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))


def _bounded_class(connection_class: Any, limit_s: float, max_bytes: int) -> Any:
    """Return a subclass of a class of connections, with bounded replies."""

    class BoundedConnection(connection_class):  # type: ignore[misc]  # the class depends on the scheme of the URL
        def _connect(self) -> Any:
            return _BoundedSocket(super()._connect(), limit_s, max_bytes)

    return BoundedConnection


def _bytes_of(answer: bytes | RedisError) -> bytes:
    if isinstance(answer, RedisError):
        if str(answer).startswith("WRONGTYPE"):  # no object; `SET` replaces it
            return b""
        raise answer
    return answer


def _name(key: bytes) -> bytes:
    return _PREFIX + key.hex().encode()
