"""Request traces: reads them in any of the known formats, and generates the tokens of each prompt from its ids.

A trace contains the arrival time of each request, the length of its prompt in tokens, and the ids of its blocks. If two
prompts begin with the same ids, they begin with the same tokens. `radixkv/planning/trace_formats.py` has the table of
formats.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from radixkv.api.awaits import Awaits
from radixkv.errors import ConfigError
from radixkv.planning.time_model import MeasuredPrefill
from radixkv.planning.trace_formats import (
    FORMATS,
    MAX_TOKENS_PER_ID,
    TIME_UNITS,
    RecordedRequest,
    TimeUnit,
    TraceFormat,
    detect_format,
)
from radixkv.planning.trace_records import read_records

TOKENS_PER_ID = 512
AUTO = "auto"
MAX_TRACE_IDS = 2**28  # 2 GiB of references
MIN_STEP_S = 1e-5  # minimum time between two requests of a replay, so that time advances without timestamps

# splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014).
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MAX_VOCAB_SIZE = 2**32
_NUM_IDS = 2**64
_MIN_UNIX_TIME_MS = 1e11  # 1973; if all timestamps are later, they are Unix times, and are counted from the first one

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        timestamp_ms: arrival time, counted from the start of the trace.
        input_length: prompt tokens, `tokens_per_id * (len(hash_ids) - 1) < input_length <= tokens_per_id *
            len(hash_ids)`.
        output_length: number of generated tokens; 0 if the trace does not contain it.
        hash_ids: ids of the prompt's blocks, in prompt order, each in `[0, 2**64)`.
        tokens_per_id: number of tokens per id; the last id covers the rest of the prompt.
        output_ids: ids of the block in which the prompt ends and of all later blocks, which have the generated tokens;
            empty if the trace does not contain them.
        session, awaits, is_last, measured: see `RecordedRequest`.
    """

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    tokens_per_id: int = TOKENS_PER_ID
    output_ids: tuple[int, ...] = ()
    session: str = ""
    awaits: Awaits = Awaits.UNKNOWN
    is_last: bool = False
    measured: MeasuredPrefill | None = None


def load_trace(
    path: str | Path,
    *,
    limit: int | None = None,
    format_name: str = AUTO,
    tokens_per_id: int | None = None,
    timestamps: TimeUnit | None = None,
) -> list[TraceRequest]:
    """Read a trace in the order of its timestamps.

    If a file that should be in this order is not, a warning is logged, as for requests without a timestamp.
    Blank lines are skipped. A request without a timestamp gets that of the request before it. Reading stops after
    `limit` requests, so damaged lines after that are not noticed; events of vLLM are always read completely. Integer
    ids below 2**64 are kept, unless they are local to a session; other ids are replaced by hashes.

    Args:
        path: a file in one of the formats, plain or compressed with gzip, or a directory of such files. Whether a
            file is compressed is detected by its first bytes, not by its name.
        limit: maximum number of requests to read; None for all.
        format_name: a key of `FORMATS`, or `auto` to detect it by the first record.
        tokens_per_id: tokens per id, `[1, 2**16]`; None for the number in the file, or for the format's default.
        timestamps: the unit of the timestamps; None for the format's.

    Raises:
        ConfigError: the file can't be read or decompressed, holds no request, has lengths or text instead of ids, or a
            line is not a request. The message names the line and the field, the expected and the actual value.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"trace limit: expected at least 1, got {limit}")
    if format_name not in (AUTO, *FORMATS):
        raise ConfigError(f"trace format: expected one of {', '.join((AUTO, *FORMATS))}, got {format_name}")
    if timestamps not in (None, *TIME_UNITS):
        raise ConfigError(f"trace timestamps: expected one of {', '.join(TIME_UNITS)}, got {timestamps}")
    if tokens_per_id is not None and not 1 <= tokens_per_id <= MAX_TOKENS_PER_ID:
        raise ConfigError(f"tokens_per_id: expected 1 to {MAX_TOKENS_PER_ID}, got {tokens_per_id}")
    records = read_records(Path(path))
    first = next(records, None)
    if first is None:
        raise ConfigError(f"trace {path}: expected at least one request, got an empty file")
    trace_format = detect_format(first) if format_name == AUTO else FORMATS[format_name]
    recorded: list[RecordedRequest] = []
    num_ids = 0
    for request in trace_format.read(itertools.chain([first], records), timestamps or trace_format.time_unit):
        recorded.append(request)
        num_ids += len(request.ids)
        if num_ids > MAX_TRACE_IDS:
            raise ConfigError(
                f"{request.where}: expected at most {MAX_TRACE_IDS:,} ids in all, got more; read only the first "
                f"{len(recorded) - 1:,} requests with a limit"
            )
        if len(recorded) == limit:
            break
    if not recorded:
        raise ConfigError(f"trace {path}: expected at least one request in the format {trace_format.name}, got none")
    default_tokens_per_id = (
        tokens_per_id or trace_format.tokens_per_id or _fitting_tokens_per_id(recorded, trace_format)
    )
    numbers = _IdNumbers()
    requests = [
        _trace_request(
            index, request, tokens_per_id or request.tokens_per_id or default_tokens_per_id, trace_format, numbers
        )
        for index, request in enumerate(recorded)
    ]
    return _sort_by_time(requests, recorded, trace_format, path)


def block_tokens(
    hash_id: int, *, tokens_per_id: int = TOKENS_PER_ID, vocab_size: int = _MAX_VOCAB_SIZE
) -> npt.NDArray[np.uint32]:
    """Generate the tokens of an id, the same ones on every machine.

    Token `i` depends only on `hash_id`, `i` and `vocab_size`, so a smaller `tokens_per_id` gives a prefix of what a
    larger one gives.

    Args:
        hash_id: `[0, 2**64)`.
        tokens_per_id: number of tokens to generate, at least 1.
        vocab_size: token ids are in `[0, vocab_size)`; at most 2**32.

    Returns:
        uint32 `[tokens_per_id]`, owned by the caller.
    """
    return _generate_blocks((hash_id,), tokens_per_id, vocab_size).reshape(-1)


def prompt_tokens(
    request: TraceRequest, *, vocab_size: int = _MAX_VOCAB_SIZE, scale: float = 1.0
) -> npt.NDArray[np.uint32]:
    """Generate the tokens of a prompt, scaled in length by `scale`.

    Two requests whose first `k` ids are equal share the tokens of these ids, or the whole shorter prompt.
    Different ids begin with the same token only by chance, once in `vocab_size`.

    Args:
        request: a request of a trace.
        vocab_size: token ids are in `[0, vocab_size)`; at most 2**32.
        scale: each id gives `tokens_per_scaled_id(scale, request.tokens_per_id)` tokens. The last id gives the same
            share of them as in the unscaled prompt, rounded, at least 1.

    Returns:
        uint32 `[num_tokens]`, owned by the caller.

    Complexity:
        Linear in the prompt, about 5 ns per token: the 145M tokens of Mooncake's conversation trace take 0.7 s.
    """
    tokens_per_id = tokens_per_scaled_id(scale, request.tokens_per_id)
    num_full_ids = len(request.hash_ids) - 1
    unscaled_last_tokens = request.input_length - request.tokens_per_id * num_full_ids
    # Rounded, in integers.
    last_tokens = (unscaled_last_tokens * tokens_per_id + request.tokens_per_id // 2) // request.tokens_per_id
    tokens = _generate_blocks(request.hash_ids, tokens_per_id, vocab_size).reshape(-1)
    return tokens[: tokens_per_id * num_full_ids + max(1, last_tokens)]


def sequence_tokens(request: TraceRequest) -> npt.NDArray[np.uint32] | None:
    """Generate the tokens of a prompt and of the answer after it that the server cached: all but the last one.

    The token ids are those of `prompt_tokens` with its default `vocab_size`.

    Returns:
        uint32 `[num_tokens]`, owned by the caller; None if the trace does not contain the ids of the answer.
    """
    if not request.output_ids:
        return None
    num_whole_ids = request.input_length // request.tokens_per_id
    ids = (*request.hash_ids[:num_whole_ids], *request.output_ids)
    # The last generated token is not cached, because nothing was computed after it.
    num_tokens = min(len(ids) * request.tokens_per_id, request.input_length + request.output_length - 1)
    return _generate_blocks(ids, request.tokens_per_id, _MAX_VOCAB_SIZE).reshape(-1)[:num_tokens]


def tokens_per_scaled_id(scale: float, tokens_per_id: int = TOKENS_PER_ID) -> int:
    """Return the number of tokens per id at this scale: `round(tokens_per_id * scale)`, at least 1.

    Raises:
        ConfigError: the scale is not a positive finite number.

    >>> tokens_per_scaled_id(0.25), tokens_per_scaled_id(0.0001)
    (128, 1)
    """
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f"trace scale: expected a positive number, got {scale}")
    return max(1, round(tokens_per_id * scale))


def _generate_blocks(hash_ids: Sequence[int], tokens_per_id: int, vocab_size: int) -> npt.NDArray[np.uint32]:
    """Generate the tokens of ids, uint32 `[num_ids, tokens_per_id]`; see `block_tokens`."""
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


class _IdNumbers:
    """The numbers of ids: integers in `[0, 2**64)` without a scope stay as they are, others are hashed to 64 bits."""

    def __init__(self) -> None:
        self._hashes: dict[tuple[str, int | str | bytes], int] = {}

    def numbers_of(self, scope: str, ids: Sequence[int | str | bytes]) -> tuple[int, ...]:
        """Return the numbers of ids, the same ones on every machine."""
        hashes = self._hashes
        numbers = []
        for each in ids:
            if not scope and isinstance(each, int) and 0 <= each < _NUM_IDS:
                numbers.append(each)
                continue
            key = scope, each
            if (number := hashes.get(key)) is None:
                number = hashes[key] = self.hash_of(scope, each)
            numbers.append(number)
        return tuple(numbers)

    @staticmethod
    def hash_of(scope: str, value: int | str | bytes) -> int:
        """Return the hash of an id in its scope."""
        text = f"{scope}\0{type(value).__name__}\0{value!r}"
        return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def _trace_request(
    index: int, request: RecordedRequest, tokens_per_id: int, trace_format: TraceFormat, numbers: _IdNumbers
) -> TraceRequest:
    """Replace ids by numbers. Tokens of the prompt after its ids get an id that no other request has."""
    num_ids, length = len(request.ids), request.input_length
    lengths = _possible_lengths(num_ids, tokens_per_id, trace_format.may_end_after_ids)
    if length not in lengths:
        raise ConfigError(
            f"{request.where}: input_length: expected {lengths.start} to {lengths.stop - 1} tokens for {num_ids} "
            f"hash_ids of {tokens_per_id} tokens, got {length}{_hint(trace_format)}"
        )
    ids = numbers.numbers_of(request.scope, request.ids)
    if length > tokens_per_id * num_ids:
        ids = (*ids, numbers.hash_of("rest", index))
    return TraceRequest(
        request.time_ms or 0.0,
        length,
        request.output_length,
        ids,
        tokens_per_id,
        numbers.numbers_of(request.scope, request.output_ids),
        request.session,
        request.awaits,
        request.is_last,
        request.measured,
    )


def _hint(trace_format: TraceFormat) -> str:
    """Return what to do about a length that does not fit the ids, as the end of an error message."""
    if trace_format.may_end_after_ids:
        return ""
    return "; give the tokens of an id (--tokens-per-id), or the format dynamo if ids cover only complete blocks"


def _fitting_tokens_per_id(recorded: Sequence[RecordedRequest], trace_format: TraceFormat) -> int:
    """Return the power of two that fits the lengths of all requests for which the file states no tokens per id.

    If several powers of two fit, this is 512 or else the smallest one. If none fits, it is 512.
    """
    sizes = [(len(each.ids), each.input_length) for each in recorded if each.tokens_per_id is None]
    candidates = [TOKENS_PER_ID, *(1 << exponent for exponent in range(MAX_TOKENS_PER_ID.bit_length()))]
    # A number with which the ids cover whole prompts is preferred to one with which prompts end after their ids.
    for may_end_after_ids in sorted({False, trace_format.may_end_after_ids}):
        for tokens_per_id in candidates:
            if all(length in _possible_lengths(num_ids, tokens_per_id, may_end_after_ids) for num_ids, length in sizes):
                return tokens_per_id
    return TOKENS_PER_ID


def _possible_lengths(num_ids: int, tokens_per_id: int, may_end_after_ids: bool) -> range:
    """Return the possible lengths of a prompt with `num_ids` ids."""
    longest = tokens_per_id * (num_ids + 1) - 1 if may_end_after_ids else tokens_per_id * num_ids
    return range(tokens_per_id * max(num_ids - 1, 0) + 1, longest + 1)


def _sort_by_time(
    requests: list[TraceRequest], recorded: Sequence[RecordedRequest], trace_format: TraceFormat, path: str | Path
) -> list[TraceRequest]:
    """Return the requests in the order of their timestamps; those without one follow the request before them."""
    latest_ms, time_ms, num_early = 0.0, 0.0, 0
    times_ms: list[float] = []
    for each in recorded:
        time_ms = time_ms if each.time_ms is None else each.time_ms
        num_early += time_ms < latest_ms
        latest_ms = max(latest_ms, time_ms)
        times_ms.append(time_ms)
    if num_early and trace_format.is_in_order:
        message = "trace %s: %d of %d requests have an earlier timestamp than a request before them; they are sorted"
        _logger.warning(message, path, num_early, len(requests))
    if num_untimed := sum(each.time_ms is None for each in recorded):
        message = "trace %s: %d of %d requests have no timestamp; each gets that of the request before it"
        _logger.warning(message, path, num_untimed, len(requests))
    start_ms = min(times_ms) if min(times_ms) >= _MIN_UNIX_TIME_MS else 0.0
    order = sorted(range(len(requests)), key=times_ms.__getitem__)
    return [replace(requests[index], timestamp_ms=times_ms[index] - start_ms) for index in order]
