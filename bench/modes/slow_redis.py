"""A fake Redis server that stores nothing, and responds late or never."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

_TIMEOUT_S = 30.0
_HELLO_ANSWER = b"%1\r\n$5\r\nproto\r\n:3\r\n"
_RESP2_NIL, _RESP3_NIL = b"$-1\r\n", b"_\r\n"
_DEFAULT_ANSWER = b"+OK\r\n"
# Answers by command: a function of the words of the command, and of the nil of the protocol's version.
_ANSWERS: dict[bytes, Callable[[Sequence[bytes], bytes], bytes]] = {
    b"HELLO": lambda _, __: _HELLO_ANSWER,
    b"GET": lambda _, nil: nil,
    b"MGET": lambda words, nil: b"*%d\r\n" % (len(words) - 1) + nil * (len(words) - 1),
    b"GETRANGE": lambda _, __: b"$0\r\n\r\n",
    b"EXISTS": lambda _, __: b":0\r\n",
    b"UNLINK": lambda _, __: b":0\r\n",
    b"PEXPIRE": lambda _, __: b":0\r\n",
    b"SCAN": lambda _, __: b"*2\r\n$1\r\n0\r\n*0\r\n",
}


class SlowRedis:
    """A server on loopback that speaks Redis's protocol and stores nothing.

    It runs on its own thread inside the `with` statement. Each response is sent after the same delay, so the responses
    of a pipeline are sent almost together.

    Args:
        delay_s: seconds from a command to its response; None for no response.

    Attributes:
        num_commands: number of commands received.
    """

    def __init__(self, delay_s: float | None) -> None:
        self.num_commands = 0
        self._delay_s = delay_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slow-redis", daemon=True)
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """The server's URL, for `tiers.redis_url`."""
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    def __enter__(self) -> SlowRedis:
        """Start to listen, on a port that the system picks."""
        self._thread.start()
        start = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(_TIMEOUT_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Close all connections, and end the thread."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_TIMEOUT_S)
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        nil = _RESP2_NIL
        try:
            while True:
                words = await _read_command(reader)
                self.num_commands += 1
                name = words[0].upper()
                if name == b"HELLO":  # the client switches to version 3 of the protocol
                    nil = _RESP3_NIL
                if self._delay_s is not None:
                    answer = _ANSWERS[name](words, nil) if name in _ANSWERS else _DEFAULT_ANSWER
                    self._loop.call_later(self._delay_s, _send, writer, answer)
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # the client has disconnected, or the server is shutting down
        finally:
            self._connections.discard(task)
            writer.close()

    async def _close(self) -> None:
        self._server.close()
        connections = list(self._connections)
        for each in connections:
            each.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _read_command(reader: asyncio.StreamReader) -> list[bytes]:
    """Read a command: an array of strings."""
    words = []
    for _ in range(int((await reader.readuntil(b"\r\n"))[1:])):
        length = int((await reader.readuntil(b"\r\n"))[1:])
        words.append((await reader.readexactly(length + 2))[:-2])
    return words


def _send(writer: asyncio.StreamWriter, answer: bytes) -> None:
    if not writer.is_closing():
        writer.write(answer)
