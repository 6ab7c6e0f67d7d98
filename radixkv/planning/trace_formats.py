"""The formats of traces: a table with one reader per format.

| format | timestamps | ids | tokens of an id |
|---|---|---|---|
| `mooncake` | ms | `hash_ids` of the whole prompt, the last id covers the rest | 512, or the power of two that fits |
| `bailian` | s | as for `mooncake` | 16 |
| `dynamo` | ms | as for `mooncake`, or of complete blocks only | in the file, or the power of two that fits |
| `weka` | s | of complete blocks only, usually local to a session | in the file, or 64 |
| `vllm` | s | hashes of blocks in BlockStored events | in the events |

A reader turns records into `RecordedRequest`s. `radixkv/planning/trace.py` turns these into the requests of a
simulation: it replaces ids of any kind by numbers, and sorts the requests by timestamp.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from radixkv.api.awaits import Awaits
from radixkv.config.model_directory import shown
from radixkv.errors import ConfigError
from radixkv.planning.time_model import MeasuredPrefill
from radixkv.planning.trace_records import Record

TimeUnit = Literal["ms", "s"]
TIME_UNITS: Mapping[TimeUnit, float] = {"ms": 1.0, "s": 1000.0}  # milliseconds

MAX_PROMPT_TOKENS = 2**26
MAX_TOKENS_PER_ID = 2**16
_MAX_INTEGER = 2**63
_UNIT_NAMES: Mapping[TimeUnit, str] = {"ms": "milliseconds", "s": "seconds"}
_TEXT_FIELDS = ("messages", "conversations", "conversation", "prompt", "text", "text_input", "body", "payload")
_CONVERT = "convert it with `radixkv trace FILE --tokenizer DIR --output TRACE`"
_EVENT_NAMES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
# What a session waits for, by the reason why its answer ended, in Anthropic's and OpenAI's terms.
_AWAITS_OF_STOP = {
    "tool_use": Awaits.TOOL,
    "tool_calls": Awaits.TOOL,
    "end_turn": Awaits.USER,
    "stop": Awaits.USER,
}
_DEVICE_MEDIA = (None, "gpu", "GPU")
# A chunk of a prefill follows after one step, and a decoded block after 16 steps; the next turn of a chat takes longer.
_SAME_REQUEST_S = 2.0


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request, with the values of its format.

    Attributes:
        where: place of the request in the file, for error messages.
        time_ms: arrival time; None for the arrival time of the previous request.
        input_length: number of prompt tokens.
        output_length: number of generated tokens; 0 if it is not known.
        ids: ids of the prompt's blocks: int, str or bytes.
        scope: requests share equal ids only if they have the same scope.
        tokens_per_id: tokens per id; None if the file does not contain it.
        output_ids: ids of the block in which the prompt ends and of all later blocks, which have the generated tokens;
            empty if the file does not contain them.
        session: the session that the request belongs to; empty for none.
        awaits: what the session waits for after the answer, according to the reason why the answer ended.
        is_last: whether the session sends nothing more.
        measured: what the server that recorded the request has measured; None if the file does not contain it.
    """

    where: str
    time_ms: float | None
    input_length: int
    output_length: int
    ids: Sequence[int | str | bytes]
    scope: str = ""
    tokens_per_id: int | None = None
    output_ids: Sequence[int | str | bytes] = ()
    session: str = ""
    awaits: Awaits = Awaits.UNKNOWN
    is_last: bool = False
    measured: MeasuredPrefill | None = None


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One format.

    Attributes:
        name: value of `--format`.
        about: description in one line.
        is_format_of: whether a file whose first record is this one has this format.
        read: yields requests from the records of a file, given the unit of its timestamps.
        time_unit: the usual unit of its timestamps.
        tokens_per_id: tokens per id if the file does not contain it; None for the power of two that fits all requests,
            preferably 512.
        may_end_after_ids: whether a prompt may have up to one block of tokens after its ids, which no other prompt
            shares.
        is_in_order: whether files of this format are expected to be sorted by timestamp.
    """

    name: str
    about: str
    is_format_of: Callable[[Any], bool]
    read: Callable[[Iterable[Record], TimeUnit], Iterator[RecordedRequest]]
    time_unit: TimeUnit
    tokens_per_id: int | None = None
    may_end_after_ids: bool = False
    is_in_order: bool = True


def detect_format(record: Record) -> TraceFormat:
    """Return the format of a file by its first record; `mooncake` if it has none of the others.

    Raises:
        ConfigError: the record contains text instead of ids. The message names the next step.
    """
    fields = record.value
    if isinstance(fields, dict) and "hash_ids" not in fields and "requests" not in fields:
        field = next((each for each in _TEXT_FIELDS if each in fields), None)
        if field is not None and not any(each.is_format_of(fields) for each in FORMATS.values()):
            raise ConfigError(f"{record.where}: expected a trace with hash_ids, got text in `{field}`; {_CONVERT}")
    return next((each for each in FORMATS.values() if each.is_format_of(fields)), FORMATS["mooncake"])


# Mooncake, and formats with the same fields


def _read_mooncake(records: Iterable[Record], unit: TimeUnit, *, trace_name: str) -> Iterator[RecordedRequest]:
    for where, value in records:
        fields = _object(value, where)
        ids = _ids(_field(fields, "hash_ids", where, trace_name), "hash_ids", 1, where)
        input_length = _integer(_field(fields, "input_length", where, trace_name), "input_length", 1, where)
        yield RecordedRequest(
            where,
            _time_ms(fields.get("timestamp"), "timestamp", where, unit),
            input_length,
            _output_length(fields.get("output_length"), "output_length", where),
            ids,
            output_ids=_ids(fields.get("output_hash_ids", []), "output_hash_ids", 0, where),
            session=str(fields.get("session", "")),
            awaits=_AWAITS_OF_STOP.get(str(fields.get("stop")), Awaits.UNKNOWN),
            is_last=fields.get("last") is True,
            measured=_measured(fields, input_length, where),
        )


def _measured(fields: dict[str, Any], input_length: int, where: str) -> MeasuredPrefill | None:
    """Return what the server of radixkv that recorded the line has measured; None if the line has no `ttft_ms`."""
    if "ttft_ms" not in fields:
        return None
    cached_tokens = _integer(fields.get("cached_length", 0), "cached_length", 0, where, input_length)
    loaded = {
        str(tier): _integer(value, f"loaded_lengths.{tier}", 0, where)
        for tier, value in _object(fields.get("loaded_lengths", {}), f"{where}: loaded_lengths").items()
    }
    ttft_ms = _time_ms(fields["ttft_ms"], "ttft_ms", where, "ms") or 0.0
    return MeasuredPrefill(cached_tokens, input_length, loaded, ttft_ms / 1000)


def _is_bailian(value: Any) -> bool:
    return isinstance(value, dict) and "hash_ids" in value and "chat_id" in value


# Dynamo: a log of its frontend; or Mooncake's fields with sessions, which may follow a header line


_DYNAMO_FIELDS = frozenset({"session_id", "delay", "delay_ms", "created_time", "input_tokens", "output_tokens"})


def _is_dynamo(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    is_log = str(value.get("event_type")).startswith(("request_", "tool_"))
    has_schema = str(value.get("schema")).startswith("dynamo.")
    return is_log or has_schema or ("hash_ids" in value and not _DYNAMO_FIELDS.isdisjoint(value))


def _read_dynamo(records: Iterable[Record], unit: TimeUnit) -> Iterator[RecordedRequest]:
    session_times_ms: dict[str, float] = {}
    tokens_per_id, is_local = None, False
    for where, value in records:
        fields = _object(value, where)
        if "event_type" in fields:
            if (request := _dynamo_logged(fields, where, unit)) is not None:
                yield request
        elif "schema" in fields and "hash_ids" not in fields:
            tokens_per_id = _tokens_per_id(_field(fields, "block_size", where, "Dynamo"), "block_size", where)
            is_local = fields.get("hash_id_scope") == "local"
        else:
            time_ms = _session_time_ms(fields, session_times_ms, where, unit)
            scope = str(fields.get("play_id", "")) if is_local else ""
            yield _dynamo_row(fields, where, time_ms, scope, tokens_per_id)


def _dynamo_logged(fields: dict[str, Any], where: str, unit: TimeUnit) -> RecordedRequest | None:
    """Return the request of a line of the frontend's log; None if the line is not the end of a request with its ids."""
    request = fields.get("request")
    if fields["event_type"] != "request_end" or not isinstance(request, dict) or not request.get("replay"):
        return None
    replay = _object(request["replay"], f"{where}: request.replay")
    time_field = "request_received_ms" if request.get("request_received_ms") is not None else "event_time_unix_ms"
    return RecordedRequest(
        where,
        _time_ms(request.get(time_field, fields.get(time_field)), time_field, where, unit),
        _integer(_field(replay, "input_length", where, "Dynamo"), "input_length", 1, where),
        _output_length(request.get("output_tokens"), "output_tokens", where),
        _ids(_field(replay, "input_sequence_hashes", where, "Dynamo"), "input_sequence_hashes", 0, where),
        tokens_per_id=_tokens_per_id(_field(replay, "trace_block_size", where, "Dynamo"), "trace_block_size", where),
    )


def _dynamo_row(
    fields: dict[str, Any], where: str, time_ms: float | None, scope: str, tokens_per_id: int | None
) -> RecordedRequest:
    input_field = "input_tokens" if "input_tokens" in fields else "input_length"
    output_field = "output_tokens" if "output_tokens" in fields else "output_length"
    return RecordedRequest(
        where,
        time_ms,
        _integer(_field(fields, input_field, where, "Dynamo"), input_field, 1, where),
        _output_length(fields.get(output_field), output_field, where),
        _ids(_field(fields, "hash_ids", where, "Dynamo"), "hash_ids", 0, where),
        scope,
        tokens_per_id,
    )


def _session_time_ms(
    fields: dict[str, Any], session_times_ms: dict[str, float], where: str, unit: TimeUnit
) -> float | None:
    """Return the time of a request, and record it in `session_times_ms`.

    It is the request's own time, or the time of the previous request of its session plus a delay; None without either.
    """
    time_fields = ("timestamp", "created_time", "not_before_ms")
    time_field = next((each for each in time_fields if fields.get(each) is not None), "timestamp")
    time_ms = _time_ms(fields.get(time_field), time_field, where, unit)
    session = fields.get("session_id")
    if session is None:
        return time_ms
    key = f"{fields.get('play_id', '')}\0{session}"
    if time_ms is None and key in session_times_ms:
        delay_field = next((each for each in ("delay", "delay_ms") if fields.get(each) is not None), "delay")
        time_ms = session_times_ms[key] + (_time_ms(fields.get(delay_field), delay_field, where, unit) or 0.0)
    if time_ms is not None:
        session_times_ms[key] = time_ms
    return time_ms


# weka: sessions of agents, one JSON object each


def _is_weka(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("requests"), list)


def _read_weka(records: Iterable[Record], unit: TimeUnit) -> Iterator[RecordedRequest]:
    for number, (where, value) in enumerate(records):
        session = _object(value, where)
        tokens_per_id = _tokens_per_id(session.get("block_size", 64), "block_size", where)
        scope = "" if session.get("hash_id_scope") == "global" else f"session {number}"
        requests = _field(session, "requests", where, "weka")
        if not isinstance(requests, list):
            raise ConfigError(f"{where}: requests: expected a list of requests, got {shown(requests)}")
        timed = list(_weka_requests(requests, where, unit))
        _, last_index = max(((time_ms or 0.0, index) for index, (_, _, time_ms) in enumerate(timed)), default=(0.0, 0))
        for index, (request_where, fields, time_ms) in enumerate(timed):
            input_field = "input_length" if "input_length" in fields else "in"
            output_field = "output_length" if "output_length" in fields else "out"
            yield RecordedRequest(
                request_where,
                time_ms,
                _integer(_field(fields, input_field, request_where, "weka"), input_field, 1, request_where),
                _output_length(fields.get(output_field), output_field, request_where),
                _ids(fields.get("hash_ids", []), "hash_ids", 0, request_where),
                scope,
                tokens_per_id,
                session=f"session {number}",
                awaits=_AWAITS_OF_STOP.get(str(fields.get("stop")), Awaits.UNKNOWN),
                is_last=index == last_index,
            )


def _weka_requests(
    requests: Sequence[Any], where: str, unit: TimeUnit
) -> Iterator[tuple[str, dict[str, Any], float | None]]:
    """Yield the requests of a session and of its sub-agents, with their times since the session's start.

    The times of a sub-agent's requests are relative to its start. If none of them is smaller than its start time, they
    are relative to the same origin as that start time.
    """
    pending = [(f"{where}: requests", requests, 0.0)]  # lists of requests, and the time from which their times count
    while pending:
        list_where, values, origin_ms = pending.pop(0)
        for index, value in enumerate(values):
            value_where = f"{list_where}[{index}]"
            fields = _object(value, value_where)
            offset_ms = _time_ms(fields.get("t"), "t", value_where, unit)
            time_ms = None if offset_ms is None else origin_ms + offset_ms
            if "requests" not in fields:
                yield value_where, fields, time_ms
                continue
            inner_requests = fields["requests"]
            if not isinstance(inner_requests, list):
                raise ConfigError(f"{value_where}: requests: expected a list of requests, got {shown(inner_requests)}")
            inner_offsets_ms = [
                _time_ms(_object(each, value_where).get("t"), "t", value_where, unit) or 0.0 for each in inner_requests
            ]
            have_same_origin = offset_ms is None or min(inner_offsets_ms, default=0.0) >= offset_ms > 0
            pending.append(
                (f"{value_where}.requests", inner_requests, origin_ms if have_same_origin else time_ms or 0.0)
            )


# vLLM: the log of its K/V events


@dataclass(slots=True)
class _Chain:
    """A prompt whose blocks were stored by BlockStored events. Later events may extend it."""

    where: str
    time_ms: float | None
    hashes: list[int | str | bytes]
    tokens_per_id: int
    last_where: str
    last_ms: float | None


def _is_vllm(value: Any) -> bool:
    if isinstance(value, dict):
        return _is_event_name(value.get("type")) or ("ts" in value and isinstance(value.get("events"), list))
    if not isinstance(value, list) or not value:
        return False
    is_batch = len(value) >= 2 and isinstance(value[0], int | float) and isinstance(value[1], list)
    return is_batch or _is_event_name(value[0])


def _is_event_name(value: object) -> bool:
    return isinstance(value, str) and value in _EVENT_NAMES


def _read_vllm(records: Iterable[Record], unit: TimeUnit) -> Iterator[RecordedRequest]:
    """Yield a request for each prompt whose blocks were stored.

    An event without a parent begins a prompt. The prompt of an event with a parent begins with the blocks up to that
    parent. The event belongs to the request that stored the parent if that happened in an earlier step and at most two
    seconds before, since chunks of a prefill and decoded blocks are stored one after the other. Otherwise the event
    begins another request.
    """
    chains: list[_Chain] = []
    parents: dict[int | str | bytes, int | str | bytes | None] = {}
    chains_by_last_block: dict[int | str | bytes, _Chain] = {}
    counted_group: object = None
    for where, time_ms, event in _vllm_events(records, unit):
        hashes, parent, tokens_per_id, group = _parse_stored_event(event, where)
        if not hashes:
            continue
        counted_group = group if counted_group is None else counted_group
        if group != counted_group:  # a model with several kinds of layers has several groups: the first one counts
            continue
        chain = None if parent is None else chains_by_last_block.get(parent)
        if parent is None or chain is None or not _continues(chain, where, time_ms):
            chain = _Chain(where, time_ms, _hashes_up_to(parent, parents), tokens_per_id, where, time_ms)
            chains.append(chain)
        else:
            del chains_by_last_block[parent]
        chain.hashes += hashes
        chain.last_where, chain.last_ms = where, time_ms
        for block_hash, parent_hash in zip(hashes, [parent, *hashes], strict=False):
            parents.setdefault(block_hash, parent_hash)
        chains_by_last_block[hashes[-1]] = chain
        if len(chain.hashes) * tokens_per_id > MAX_PROMPT_TOKENS:
            raise ConfigError(f"{where}: expected prompts of at most {MAX_PROMPT_TOKENS:,} tokens, got a longer one")
    for chain in chains:
        num_tokens = len(chain.hashes) * chain.tokens_per_id
        yield RecordedRequest(
            chain.where, chain.time_ms, num_tokens, 0, chain.hashes, tokens_per_id=chain.tokens_per_id
        )


def _continues(chain: _Chain, where: str, time_ms: float | None) -> bool:
    """Whether an event at this place and time belongs to the same request as the last blocks of a chain."""
    if time_ms is None or chain.last_ms is None or chain.last_where == where:
        return False
    return time_ms - chain.last_ms <= 1000 * _SAME_REQUEST_S


def _hashes_up_to(
    block_hash: int | str | bytes | None, parents: Mapping[int | str | bytes, int | str | bytes | None]
) -> list[int | str | bytes]:
    """Return the hashes from the first block to this one, as far as the log has them."""
    path: list[int | str | bytes] = []
    seen = set()
    while block_hash is not None and block_hash not in seen:
        path.append(block_hash)
        seen.add(block_hash)
        block_hash = parents.get(block_hash)
    path.reverse()
    return path


def _vllm_events(
    records: Iterable[Record], unit: TimeUnit
) -> Iterator[tuple[str, float | None, dict[str, Any] | list[Any]]]:
    """Yield the BlockStored events of batches or of single events, each as a map or an array."""
    for where, value in records:
        if isinstance(value, dict) and "events" in value:
            time, events = value.get("ts"), value["events"]
        elif (
            isinstance(value, list) and len(value) >= 2 and isinstance(value[1], list) and not _begins_with_name(value)
        ):
            time, events = value[0], value[1]
        else:
            time = value.get("ts") if isinstance(value, dict) else None
            events = [value]
        time_ms = _time_ms(time, "ts", where, unit)
        if not isinstance(events, list):
            raise ConfigError(f"{where}: events: expected a list of events, got {shown(events)}")
        for event in events:
            name = None
            if isinstance(event, dict):
                name = event.get("type")
            elif _begins_with_name(event):
                name = event[0]
            if not _is_event_name(name):
                raise ConfigError(f"{where}: expected events {', '.join(sorted(_EVENT_NAMES))}, got {shown(event)}")
            if name == "BlockStored":
                yield where, time_ms, event


def _begins_with_name(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], str)


_STORED_FIELDS = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)


def _parse_stored_event(
    event: dict[str, Any] | list[Any], where: str
) -> tuple[Sequence[int | str | bytes], int | str | bytes | None, int, object]:
    """Return hashes, parent, tokens per block and group of a BlockStored event; no hashes for an event of a tier."""
    fields = event if isinstance(event, dict) else dict(zip(_STORED_FIELDS, event, strict=False))
    if fields.get("medium") not in _DEVICE_MEDIA:
        return (), None, 1, None
    hashes = _ids(_field(fields, "block_hashes", where, "vLLM"), "block_hashes", 0, where)
    parent = fields.get("parent_block_hash")
    parents = [] if parent is None else _ids([parent], "parent_block_hash", 1, where)
    tokens_per_id = _tokens_per_id(_field(fields, "block_size", where, "vLLM"), "block_size", where)
    return hashes, (parents[0] if parents else None), tokens_per_id, fields.get("group_idx") or 0


# Fields


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {shown(value)}")
    return value


def _field(fields: Mapping[str, Any], name: str, where: str, trace_name: str) -> object:
    try:
        return fields[name]
    except KeyError:
        got = ", ".join(map(str, itertools.islice(fields, 8))) or "none"
        message = f"{where}: {name}: expected this field of a {trace_name} trace, got fields: {got}"
        if name == "hash_ids":
            message += "; without ids a trace does not say which prompts share a prefix"
            message += f"; if it has text, {_CONVERT}" if any(each in fields for each in _TEXT_FIELDS) else ""
        raise ConfigError(message) from None


def _integer(value: object, name: str, minimum: int, where: str, maximum: int = MAX_PROMPT_TOKENS) -> int:
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_INTEGER:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{where}: {name}: expected an integer of at least {minimum}, got {shown(value)}")
    if value > maximum:
        raise ConfigError(f"{where}: {name}: expected at most {maximum:,}, got {shown(value)}")
    return value


def _output_length(value: object, name: str, where: str) -> int:
    return 0 if value is None else _integer(value, name, 0, where, _MAX_INTEGER)


def _tokens_per_id(value: object, name: str, where: str) -> int:
    return _integer(value, name, 1, where, MAX_TOKENS_PER_ID)


def _time_ms(value: object, name: str, where: str, unit: TimeUnit) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MAX_INTEGER:
        raise ConfigError(f"{where}: {name}: expected {_UNIT_NAMES[unit]} of at least 0, got {shown(value)}")
    return value if unit == "ms" else value * TIME_UNITS[unit]


def _ids(value: object, name: str, minimum: int, where: str) -> Sequence[int | str | bytes]:
    """Return ids of any kind. Floats without a fraction count as integers, since some JSON writers produce them."""
    if not isinstance(value, list) or len(value) < minimum:
        expected = "a list of at least one id" if minimum else "a list"
        raise ConfigError(f"{where}: {name}: expected {expected}, got {shown(value)}")
    if {int, str, bytes}.issuperset(map(type, value)):
        return value
    ids: list[int | str | bytes] = []
    for position, each in enumerate(value):
        if isinstance(each, float) and math.isfinite(each) and each.is_integer():
            each = int(each)
        if isinstance(each, bool) or not isinstance(each, int | str | bytes):
            message = f"{where}: {name}[{position}]: expected an integer or a string, got {shown(each)}"
            raise ConfigError(message)
        ids.append(each)
    return ids


FORMATS: Mapping[str, TraceFormat] = {
    each.name: each
    for each in (
        TraceFormat(
            "weka",
            "sessions of agents, each a JSON object with requests",
            _is_weka,
            _read_weka,
            "s",
            may_end_after_ids=True,
            is_in_order=False,
        ),
        TraceFormat("vllm", "K/V events of vLLM, as msgpack or JSON lines", _is_vllm, _read_vllm, "s"),
        TraceFormat(
            "bailian",
            "Alibaba's requests with chat_id and hash_ids",
            _is_bailian,
            partial(_read_mooncake, trace_name="Bailian"),
            "s",
            tokens_per_id=16,
        ),
        TraceFormat(
            "dynamo",
            "Dynamo's request log, and Mooncake's fields with sessions",
            _is_dynamo,
            _read_dynamo,
            "ms",
            may_end_after_ids=True,
        ),
        TraceFormat(
            "mooncake",
            "requests with timestamp, input_length, output_length and hash_ids",
            lambda value: isinstance(value, dict) and "hash_ids" in value,
            partial(_read_mooncake, trace_name="Mooncake"),
            "ms",
        ),
    )
}
