"""Mooncake request traces: reads them, and generates the tokens of each prompt from its hash ids.

A trace is a file of JSON lines, one request per line: `timestamp` (ms), `input_length`, `output_length` (tokens) and
`hash_ids`. Each id represents 512 tokens, the last one the rest of the prompt. Equal ids represent equal tokens.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from radixkv.errors import ConfigError

TOKENS_PER_ID = 512

# splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MAX_VOCAB_SIZE = 2**32
_GZIP_MAGIC = b"\x1f\x8b"  # RFC 1952, section 2.3.1; no JSON begins with it


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        timestamp_ms: arrival time, counted from the start of the trace.
        input_length: prompt tokens, `512 * (len(hash_ids) - 1) < input_length <= 512 * len(hash_ids)`.
        output_length: generated tokens.
        hash_ids: ids of the prompt's blocks, in prompt order.
    """

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def load_trace(path: str | Path, *, limit: int | None = None) -> list[TraceRequest]:
    """Read a trace in file order.

    Blank lines are skipped. Reading stops after `limit` requests, so later lines may be damaged.

    Args:
        path: a Mooncake JSONL file, plain or compressed with gzip. The first two bytes decide, not the name.
        limit: the most requests to read; None for all.

    Raises:
        ConfigError: the file can't be read or decompressed, holds no request, or a line is not a request. The message
            names the line, the field, what was expected and what came.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"trace limit: expected at least 1, got {limit}")
    requests: list[TraceRequest] = []
    try:
        for line_number, line in enumerate(_lines(Path(path)), start=1):
            if line.isspace():
                continue
            requests.append(_parse_request(line, f"{path}:{line_number}"))
            if len(requests) == limit:
                break
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(
            f"trace {path}: expected whole gzip data, got damage after {len(requests)} requests ({error})"
        ) from error
    except OSError as error:
        raise ConfigError(f"trace {path}: expected a readable file, got: {error.strerror}") from error
    if not requests:
        raise ConfigError(f"trace {path}: expected at least one request, got an empty file")
    return requests


def block_tokens(
    hash_id: int, *, tokens_per_id: int = TOKENS_PER_ID, vocab_size: int = _MAX_VOCAB_SIZE
) -> npt.NDArray[np.uint32]:
    """Generate the tokens of an id, the same ones on every machine.

    Token `i` depends only on `hash_id`, `i` and `vocab_size`, so a smaller `tokens_per_id` gives a prefix of what a
    larger one gives.

    Args:
        hash_id: `[0, 2**63)`.
        tokens_per_id: number of tokens to make, at least 1.
        vocab_size: token ids are in `[0, vocab_size)`; at most 2**32.

    Returns:
        uint32 `[tokens_per_id]`, owned by the caller.
    """
    return _blocks((hash_id,), tokens_per_id, vocab_size).reshape(-1)


def prompt_tokens(request: TraceRequest, *, vocab_size: int, scale: float = 1.0) -> npt.NDArray[np.uint32]:
    """Generate the tokens of a prompt, scaled in length by `scale`.

    Two requests whose first `k` ids are equal share the tokens of these ids, or the whole of the shorter prompt.
    Different ids begin with the same token only by chance, once in `vocab_size`.

    Args:
        request: a request of a trace.
        vocab_size: token ids are in `[0, vocab_size)`; at most 2**32.
        scale: each id gives `tokens_per_scaled_id(scale)` tokens, the last one its share of them, at least 1.

    Returns:
        uint32 `[num_tokens]`, owned by the caller.

    Complexity:
        Linear in the prompt, about 5 ns per token: the 145M tokens of the conversation trace take 0.7 s.
    """
    tokens_per_id = tokens_per_scaled_id(scale)
    last_tokens = request.input_length - TOKENS_PER_ID * (len(request.hash_ids) - 1)
    kept_of_last = max(1, (last_tokens * tokens_per_id + TOKENS_PER_ID // 2) // TOKENS_PER_ID)
    tokens = _blocks(request.hash_ids, tokens_per_id, vocab_size).reshape(-1)
    return tokens[: tokens_per_id * (len(request.hash_ids) - 1) + kept_of_last]


def tokens_per_scaled_id(scale: float) -> int:
    """Return the tokens of an id at this scale: `round(512 * scale)`, at least 1.

    Raises:
        ConfigError: the scale is not a positive finite number.

    >>> tokens_per_scaled_id(0.25), tokens_per_scaled_id(0.0001)
    (128, 1)
    """
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f"trace scale: expected a positive number, got {scale}")
    return max(1, round(TOKENS_PER_ID * scale))


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        is_compressed = file.peek(2)[:2] == _GZIP_MAGIC  # a pipe can be peeked at, but not read again
        yield from gzip.GzipFile(fileobj=file) if is_compressed else file


def _blocks(hash_ids: Sequence[int], tokens_per_id: int, vocab_size: int) -> npt.NDArray[np.uint32]:
    if not 1 <= vocab_size <= _MAX_VOCAB_SIZE:
        raise ConfigError(f"vocab_size: expected 1 to {_MAX_VOCAB_SIZE}, got {vocab_size}")
    streams = np.array(hash_ids, dtype=np.uint64)[:, None] + np.uint64(1)  # [num_ids, 1]; id 0 must not be state 0
    streams *= _GAMMA
    _mix(streams)
    offsets = np.arange(1, tokens_per_id + 1, dtype=np.uint64) * _GAMMA  # [tokens_per_id]
    draws = streams + offsets  # [num_ids, tokens_per_id]
    _mix(draws)
    draws >>= np.uint64(32)
    draws *= np.uint64(vocab_size)  # the high half of a 32 x 32 bit product is a draw from [0, vocab_size)
    draws >>= np.uint64(32)
    return draws.astype(np.uint32)


def _mix(values: npt.NDArray[np.uint64]) -> None:
    values ^= values >> np.uint64(30)
    values *= _MIX_1
    values ^= values >> np.uint64(27)
    values *= _MIX_2
    values ^= values >> np.uint64(31)


def _parse_request(line: bytes, where: str) -> TraceRequest:
    try:
        fields = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: expected a JSON object, got bytes that are not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: expected a JSON object, got text that is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {_shown(fields)}")
    hash_ids = _require(fields, "hash_ids", where)
    if not isinstance(hash_ids, list) or not hash_ids:
        raise ConfigError(f"{where}: hash_ids: expected a list of at least one id, got {_shown(hash_ids)}")
    for position, hash_id in enumerate(hash_ids):
        _require_int(hash_id, f"hash_ids[{position}]", 0, where)
    input_length = _require_int(_require(fields, "input_length", where), "input_length", 1, where)
    most = TOKENS_PER_ID * len(hash_ids)
    if not most - TOKENS_PER_ID < input_length <= most:
        raise ConfigError(
            f"{where}: input_length: expected {most - TOKENS_PER_ID + 1} to {most} tokens for {len(hash_ids)} hash_ids "
            f"of {TOKENS_PER_ID} tokens, got {input_length}"
        )
    return TraceRequest(
        timestamp_ms=_require_time(_require(fields, "timestamp", where), where),
        input_length=input_length,
        output_length=_require_int(_require(fields, "output_length", where), "output_length", 0, where),
        hash_ids=tuple(hash_ids),
    )


def _require(fields: dict[str, Any], name: str, where: str) -> object:
    try:
        return fields[name]
    except KeyError:
        got = ", ".join(itertools.islice(fields, 8)) or "none"
        raise ConfigError(f"{where}: {name}: expected this field of a Mooncake trace, got fields: {got}") from None


def _require_int(value: object, name: str, least: int, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise ConfigError(f"{where}: {name}: expected an integer of at least {least}, got {_shown(value)}")
    return value


def _require_time(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63:
        raise ConfigError(f"{where}: timestamp: expected milliseconds of at least 0, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 60 else text[:57] + "..."
