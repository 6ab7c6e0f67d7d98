"""Every format is detected and read correctly: hit rates of `lru` equal an independent count."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import pytest

from radixkv.errors import ConfigError
from radixkv.planning.simulate import simulate
from radixkv.planning.trace import load_trace
from radixkv.planning.trace_formats import FORMATS
from radixkv.planning.trace_records import read_records

UNLIMITED = 10**6


class Asked(NamedTuple):
    """A request of a chat, before any format writes it down."""

    time_s: float
    session: int
    blocks: tuple[int, ...]  # complete ones; equal numbers are equal blocks
    rest: int  # tokens after them, which no other prompt shares


def chats(seed: int, tokens_per_id: int, *, shares_system_prompt: bool = True) -> list[Asked]:
    """Make chats that take turns at random: each turn appends blocks, and some branch off an earlier turn."""
    dice, new = random.Random(seed), iter(range(100, UNLIMITED))
    histories = [[(1, 2, 3) if shares_system_prompt else (next(new),)] for _ in range(8)]
    asked = []
    for turn in range(150):
        session = dice.randrange(len(histories))
        past = dice.choice(histories[session]) if dice.random() < 0.2 else histories[session][-1]
        blocks = (*past[:30], *(next(new) for _ in range(dice.randint(1, 4))))
        histories[session].append(blocks)
        asked.append(Asked(10.0 * turn, session, blocks, dice.randrange(tokens_per_id)))
    return asked


def count_lru_hits(asked: Iterable[Asked], tokens_per_id: int, num_blocks: int) -> tuple[int, int]:
    """Count the tokens of all prompts, and those that a cache of so many blocks has, with only a dict of prefixes.

    A request uses the prefixes of all its blocks, the shortest one last, so that the end of a prompt goes before its
    beginning. The rest of a prompt takes a block as well. At least one token is computed.
    """
    cache: OrderedDict[tuple[Any, ...], None] = OrderedDict()
    prompt_tokens = cached_tokens = 0
    for number, each in enumerate(asked):
        length = len(each.blocks) * tokens_per_id + each.rest
        prompt_tokens += length
        path = (*each.blocks, *([("rest", number)] if each.rest else []))
        if len(path) > num_blocks:
            continue
        prefixes = [path[:end] for end in range(1, len(path) + 1)]
        hits = next((index for index, prefix in enumerate(prefixes) if prefix not in cache), len(prefixes))
        cached_tokens += min(hits * tokens_per_id, length - 1)
        for prefix in reversed(prefixes):
            cache[prefix] = None
            cache.move_to_end(prefix)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return prompt_tokens, cached_tokens


def lengths(each: Asked, tokens_per_id: int) -> tuple[int, int]:
    return len(each.blocks) * tokens_per_id + each.rest, 10 + each.session


def mooncake(asked: list[Asked], tokens_per_id: int = 512) -> list[Any]:
    """FAST25-release/traces: ids of the whole prompt, numbered by first appearance, times in milliseconds."""
    numbers: dict[object, int] = {}
    rows = []
    for index, each in enumerate(asked):
        path = [*each.blocks, *([("rest", index)] if each.rest else [])]
        ids = [numbers.setdefault(block, len(numbers)) for block in path]
        length, output = lengths(each, tokens_per_id)
        time = round(each.time_s * 1000)
        rows.append({"timestamp": time, "input_length": length, "output_length": output, "hash_ids": ids})
    return rows


def bailian(asked: list[Asked]) -> list[Any]:
    """qwen-bailian-usagetraces-anon: ids of 16 tokens, times in seconds."""
    rows = []
    for chat_id, (each, row) in enumerate(zip(asked, mooncake(asked, 16), strict=True)):
        more = {"chat_id": chat_id, "parent_chat_id": -1, "type": "text", "turn": 1}
        rows.append({**more, **row, "timestamp": each.time_s})
    return rows


def dynamo_sessions(asked: list[Asked]) -> list[Any]:
    """Dynamo's data generator: Mooncake's fields with ids of 64 tokens; later turns have a delay instead of a time."""
    rows, last_s = [], dict[int, float]()
    for each, row in zip(asked, mooncake(asked, 64), strict=True):
        row["session_id"] = f"session-{each.session}"
        if each.session in last_s:
            del row["timestamp"]
            row["delay"] = 1000 * (each.time_s - last_s[each.session])
        last_s[each.session] = each.time_s
        rows.append(row)
    return rows


def dynamo_log(asked: list[Asked]) -> list[Any]:
    """The log of Dynamo's frontend: 64-bit hashes of complete blocks, the time of day, other events between."""
    rows: list[Any] = []
    for index, each in enumerate(asked):
        length, output = lengths(each, 64)
        hashes = [(2**63 + 0x9E3779B97F4A7C15 * block) % 2**64 | 2**63 for block in each.blocks]
        rows.append({"event_type": "request_payload", "request_id": f"r{index}"})
        request = {
            "request_id": f"r{index}",
            "model": "m",
            "input_tokens": length,
            "output_tokens": output,
            "request_received_ms": 1_764_000_000_000 + 1000 * each.time_s,
            "replay": {"trace_block_size": 64, "input_length": length, "input_sequence_hashes": hashes},
        }
        rows.append(
            {
                "schema": "dynamo.request.trace.v1",
                "event_type": "request_end",
                "event_time_unix_ms": 1_764_000_000_500 + int(1000 * each.time_s),
                "agent_context": {"session_id": f"s{each.session}"},
                "request": request,
            }
        )
    return rows


def dynamo_plays(asked: list[Asked]) -> list[Any]:
    """agentic_mooncake: a header, and requests whose ids are local to a play."""
    source = {"format": "test", "digest": "0"}
    header = {
        "schema": "dynamo.agentic_mooncake",
        "version": 2,
        "block_size": 64,
        "hash_id_scope": "local",
        "source": source,
    }
    numbers: dict[tuple[int, int], int] = {}
    next_numbers: dict[int, int] = {}
    rows: list[Any] = [header]
    for index, each in enumerate(asked):
        ids = []
        for block in each.blocks:
            if (each.session, block) not in numbers:
                numbers[each.session, block] = next_numbers[each.session] = next_numbers.get(each.session, 0) + 1
            ids.append(numbers[each.session, block])
        length, output = lengths(each, 64)
        rows.append(
            {
                "request_id": f"r{index}",
                "play_id": f"p{each.session}",
                "session_id": "main",
                "model": "m",
                "input_length": length,
                "output_length": output,
                "hash_ids": ids,
                "not_before_ms": 1000 * each.time_s,
                "dependencies": [],
            }
        )
    return rows


def weka(asked: list[Asked]) -> list[Any]:
    """kv-cache-tester: a session each, local ids of complete blocks, and sub-agents with times of their own."""
    sessions: list[Any] = []
    for session in sorted({each.session for each in asked}):
        numbers: dict[int, int] = {}
        requests: list[Any] = []
        agent: dict[str, Any] | None = None
        for index, each in enumerate(each for each in asked if each.session == session):
            length, output = lengths(each, 64)
            request: dict[str, Any] = {
                "t": each.time_s,
                "type": "ns"[index % 2],
                "model": "m",
                "in": length,
                "out": output,
                "hash_ids": [numbers.setdefault(block, len(numbers) + 1) for block in each.blocks],
                "input_types": ["text"],
                "output_types": ["text"],
                "stop": "end_turn",
                "api_time": 1.5,
                "think_time": 0.0,
            }
            if index % 5 == 3:
                agent = {"t": each.time_s, "type": "subagent", "agent_id": f"agent_{index}", "status": "completed"}
                requests.append(agent | {"requests": [request | {"t": 0.0}], "models": ["m"]})
            else:
                requests.append(request)
        sessions.append(
            {
                "id": f"trace_{session}",
                "models": ["m"],
                "block_size": 64,
                "hash_id_scope": "local",
                "tool_tokens": 12_000,
                "system_tokens": 3_000,
                "requests": requests,
                "totals": {},
            }
        )
    return sessions


def vllm(asked: list[Asked], *, is_array: bool, hash_of: Callable[[int], Any]) -> list[Any]:
    """KVEventBatch of an engine whose cache never evicts: prefills of up to two chunks, then a decoded block."""
    stored: set[tuple[int, ...]] = set()
    batches: list[Any] = []
    for each in asked:
        hits = next(end for end in range(len(each.blocks) + 1) if each.blocks[: end + 1] not in stored)
        stored |= {each.blocks[:end] for end in range(1, len(each.blocks) + 1)}
        new = each.blocks[hits:]
        for step, chunk in enumerate(filter(None, (new[:2], new[2:3], new[3:]))):
            before = each.blocks[: hits + 2 * step - (step == 2)]
            parent = hash_of(before[-1]) if before else None
            hashes = [hash_of(block) for block in chunk]
            fields = {
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": [7] * 16 * len(chunk),
                "block_size": 16,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
            }
            offloaded = fields | {"medium": "CPU"}
            removed = {"block_hashes": hashes[:1], "medium": "GPU"}
            events: list[Any] = []
            for name, event in (("BlockStored", fields), ("BlockStored", offloaded), ("BlockRemoved", removed)):
                events.append([name, *event.values()] if is_array else {"type": name, **event})
            time_s = 1_764_000_000 + each.time_s + 0.5 * step
            batches.append([time_s, events, 0] if is_array else {"ts": time_s, "events": events})
    return batches


def by_session(asked: list[Asked]) -> list[Asked]:
    """Give equal blocks of different sessions different numbers, as formats with local ids have them."""
    return [each._replace(blocks=tuple((each.session + 1) * UNLIMITED + b for b in each.blocks)) for each in asked]


def without_rests(asked: list[Asked]) -> list[Asked]:
    return [each._replace(rest=0) for each in asked]


def json_lines(values: list[Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in values)


def messages(values: list[Any]) -> bytes:
    return b"".join(msgpack.packb(each) for each in values)


def sha256_like(block: int) -> bytes:
    return block.to_bytes(32, "little")


class Case(NamedTuple):
    """A format, how a file of it is written, and what its requests amount to."""

    format_name: str
    tokens_per_id: int
    write: Callable[[list[Asked]], bytes]
    meaning: Callable[[list[Asked]], list[Asked]] = list


CASES = {
    "mooncake": Case("mooncake", 512, lambda asked: json_lines(mooncake(asked))),
    "mooncake of 64 tokens": Case("mooncake", 64, lambda asked: json_lines(mooncake(asked, 64))),
    "bailian": Case("bailian", 16, lambda asked: json_lines(bailian(asked))),
    "dynamo with sessions": Case("dynamo", 64, lambda asked: json_lines(dynamo_sessions(asked))),
    "dynamo's log": Case("dynamo", 64, lambda asked: json_lines(dynamo_log(asked))),
    "dynamo's plays": Case("dynamo", 64, lambda asked: json_lines(dynamo_plays(asked)), by_session),
    "weka, a session a line": Case("weka", 64, lambda asked: json_lines(weka(asked)), by_session),
    "weka, one document": Case("weka", 64, lambda asked: json.dumps(weka(asked), indent=1).encode(), by_session),
    "vllm, arrays": Case(
        "vllm",
        16,
        lambda asked: json_lines(vllm(asked, is_array=True, hash_of=lambda block: 2**63 + block)),
        without_rests,
    ),
    "vllm, maps": Case("vllm", 16, lambda asked: json_lines(vllm(asked, is_array=False, hash_of=str)), without_rests),
    "vllm, msgpack arrays": Case(
        "vllm", 16, lambda asked: messages(vllm(asked, is_array=True, hash_of=sha256_like)), without_rests
    ),
    "vllm, msgpack maps": Case(
        "vllm", 16, lambda asked: messages(vllm(asked, is_array=False, hash_of=lambda b: -b)), without_rests
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_hit_rates_of_lru_equal_an_independent_count(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    case = CASES[name]
    asked = chats(3, case.tokens_per_id)
    file = tmp_path / "trace"
    file.write_bytes(pack(case.write(asked)))
    requests = load_trace(file)
    assert requests == load_trace(file, format_name=case.format_name)
    assert {each.tokens_per_id for each in requests} == {case.tokens_per_id}
    assert [each.timestamp_ms for each in requests] == pytest.approx([1000 * each.time_s for each in asked])
    for num_blocks in (12, 60, 150, UNLIMITED):
        done = simulate(
            requests,
            policy="lru",
            capacity_tokens=num_blocks * case.tokens_per_id,
            block_size=case.tokens_per_id,
        )
        counted = count_lru_hits(case.meaning(asked), case.tokens_per_id, num_blocks)
        assert (done.prompt_tokens, done.cached_tokens) == counted
        assert counted[1] > 0


@pytest.mark.parametrize("name", CASES)
def test_every_format_has_an_optimum_at_least_as_good(tmp_path: Path, name: str) -> None:
    file = tmp_path / "trace"
    file.write_bytes(CASES[name].write(chats(4, CASES[name].tokens_per_id)))
    requests = load_trace(file)
    rates = {
        policy: simulate(requests, policy=policy, capacity_tokens=6000, block_size=16).token_hit_rate
        for policy in ("lru", "optimal")
    }
    assert 0 < rates["lru"] <= rates["optimal"]


def test_a_directory_of_sessions_is_one_trace(tmp_path: Path) -> None:
    asked = chats(5, 64)
    for number, session in enumerate(weka(asked)):
        (tmp_path / f"trace_{number:04}.json").write_text(json.dumps(session))
    (tmp_path / "README.md").write_text("not a trace")
    done = simulate(load_trace(tmp_path), policy="lru", capacity_tokens=64 * UNLIMITED, block_size=64)
    assert (done.prompt_tokens, done.cached_tokens) == count_lru_hits(by_session(asked), 64, UNLIMITED)


def test_global_ids_of_weka_are_shared_between_sessions(tmp_path: Path) -> None:
    request = {"t": 0, "type": "n", "in": 100, "out": 1, "hash_ids": [1]}
    session = {"block_size": 64, "hash_id_scope": "local", "requests": [request]}
    assert len({each.hash_ids[0] for each in load_trace(written(tmp_path, session, session))}) == 2
    session["hash_id_scope"] = "global"
    assert len({each.hash_ids[0] for each in load_trace(written(tmp_path, session, session))}) == 1


def test_sub_agents_of_weka_with_absolute_times_are_not_moved(tmp_path: Path) -> None:
    inner = [{"t": time, "type": "n", "in": 64, "out": 1, "hash_ids": [time]} for time in (20, 30)]
    agent = {"t": 20, "type": "subagent", "requests": inner}
    last = {"t": 25, "type": "n", "in": 64, "out": 1, "hash_ids": [25]}
    session = {"block_size": 64, "hash_id_scope": "global", "requests": [agent, last]}
    assert [each.hash_ids[0] for each in load_trace(written(tmp_path, session))] == [20, 25, 30]


def test_times_of_a_weka_sub_agent_can_count_from_the_start_of_the_agent_that_started_it(tmp_path: Path) -> None:
    innermost = {"t": 5, "type": "subagent", "requests": [{"t": 6, "type": "n", "in": 64, "out": 1, "hash_ids": [16]}]}
    first = {"t": 0, "type": "n", "in": 64, "out": 1, "hash_ids": [10]}
    agent = {"t": 10, "type": "subagent", "requests": [first, innermost]}
    session = {"block_size": 64, "hash_id_scope": "global", "requests": [agent]}
    trace = load_trace(written(tmp_path, session))
    assert [(each.hash_ids[0], each.timestamp_ms) for each in trace] == [(10, 10_000), (16, 16_000)]


@pytest.mark.parametrize("times", [(None, None, None), (0, 0, 0), (0, 1, 2)])
def test_the_last_request_of_a_weka_session_is_marked(tmp_path: Path, times: tuple[int | None, ...]) -> None:
    requests = [{"t": time, "type": "n", "in": 64, "out": 1, "hash_ids": [7]} for time in times]
    trace = load_trace(written(tmp_path, {"block_size": 64, "requests": requests * 4}))
    assert [each.is_last for each in trace] == [False] * 11 + [True]


def test_short_prompts_of_weka_have_no_ids_and_share_nothing(tmp_path: Path) -> None:
    request = {"t": 0, "type": "n", "in": 40, "out": 1, "hash_ids": []}
    session = {"block_size": 64, "hash_id_scope": "global", "requests": [request, request]}
    first, second = load_trace(written(tmp_path, session))
    assert first.hash_ids != second.hash_ids


def test_vllm_turns_are_requests_and_chunks_are_not(tmp_path: Path) -> None:
    def batch(time_s: float, *stored: tuple[list[str], str | None]) -> Any:
        return [time_s, [["BlockStored", hashes, parent, [], 16, None] for hashes, parent in stored], None]

    file = written(
        tmp_path,
        batch(0, (["a", "b"], None)),
        batch(0.4, (["c"], "b")),  # the next chunk
        batch(1.4, (["d"], "c"), (["x"], "b")),  # a decoded block, and another request with the first two blocks
        batch(9.0, (["e"], "d")),  # the next turn
        batch(9.1, (["f"], "unknown")),  # its beginning was stored before the log began
    )
    assert [each.input_length for each in load_trace(file)] == [4 * 16, 3 * 16, 5 * 16, 2 * 16]


def test_single_events_of_vllm_are_a_trace_too(tmp_path: Path) -> None:
    event = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "block_size": 32}
    assert load_trace(written(tmp_path, event))[0].input_length == 64
    assert load_trace(written(tmp_path, ["BlockStored", [1, 2], None, [], 32, None]))[0].input_length == 64


def test_only_one_kind_of_layers_counts_in_vllm_events(tmp_path: Path) -> None:
    events = [
        {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "block_size": 32, "group_idx": group}
        for group in (0, 1, 0)
    ]
    assert len(load_trace(written(tmp_path, {"ts": 0, "events": events}))) == 2


def test_a_log_of_removed_blocks_has_no_requests(tmp_path: Path) -> None:
    file = written(tmp_path, [0.0, [["AllBlocksCleared"], ["BlockRemoved", [1]]]])
    with pytest.raises(ConfigError, match="expected at least one request in the format vllm, got none"):
        load_trace(file)


def test_dynamo_lengths_may_count_complete_blocks_only(tmp_path: Path) -> None:
    rows = [{"session_id": "s", "input_length": n, "hash_ids": list(range(n // 64))} for n in (200, 500, 1000, 127)]
    assert {each.tokens_per_id for each in load_trace(written(tmp_path, *rows))} == {64}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([{"messages": [{"role": "user", "content": "hi"}]}], "got text in `messages`; convert it with `radixkv trace"),
        ([{"conversations": [{"from": "human", "value": "hi"}]}], "got text in `conversations`; convert it with"),
        ([{"conversation_id": "1", "conversation": [], "model": "m"}], "got text in `conversation`; convert it with"),
        ([{"custom_id": "1", "method": "POST", "body": {"messages": []}}], "got text in `body`; convert it with"),
        ([{"timestamp": 1, "text_input": "hi", "output_length": 4}], "got text in `text_input`; convert it with"),
        (
            [{"input_length": 7}],
            "hash_ids: expected this field of a Mooncake trace.*; without ids a trace does not say",
        ),
        ([{"chat_id": 1, "hash_ids": [1], "timestamp": 1}], "input_length: expected this field of a Bailian trace"),
        ([{"requests": [7]}], r":1: requests\[0\]: expected a JSON object, got int 7"),
        (
            [{"requests": [{"in": 1, "requests": 7}]}],
            r"requests\[0\]: requests: expected a list of requests, got int 7",
        ),
        ([{"requests": [{"t": "now"}]}], r"requests\[0\]: t: expected seconds of at least 0, got str 'now'"),
        ([{"block_size": 0, "requests": []}], "block_size: expected an integer of at least 1, got int 0"),
        ([{"block_size": 10**9, "requests": []}], "block_size: expected at most 65,536, got int 1000000000"),
        (
            [{"requests": [{"in": 130, "hash_ids": [1]}]}],
            "expected 1 to 127 tokens for 1 hash_ids of 64 tokens, got 130",
        ),
        ([{"requests": []}], "expected at least one request in the format weka, got none"),
        ([[0.5, [["BlockStored"]]]], "block_hashes: expected this field of a vLLM trace"),
        ([[0.5, [["Stored", 1]]]], "expected events AllBlocksCleared, BlockRemoved, BlockStored, got list"),
        (
            [[0.5, [["BlockStored", [None], None, [], 16]]]],
            r"block_hashes\[0\]: expected an integer or a string, got None",
        ),
        ([[-1.0, [["BlockStored", [1], None, [], 16]]]], "ts: expected seconds of at least 0, got float -1.0"),
        ([{"event_type": "request_end", "request": {"replay": {}}}], "in the format dynamo, got none"),
        (
            [{"event_type": "request_end", "request": {"replay": {"input_length": 1}}}],
            "input_sequence_hashes: expected",
        ),
        ([{"schema": "dynamo.agentic_mooncake"}], "block_size: expected this field of a Dynamo trace"),
    ],
)
def test_what_is_not_a_trace_is_refused_with_the_next_step(tmp_path: Path, values: list[Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_trace(written(tmp_path, *values))


def test_a_later_record_of_another_format_is_refused(tmp_path: Path) -> None:
    good = mooncake(chats(0, 512))[0]
    with pytest.raises(ConfigError, match=re.escape(":2: hash_ids: expected this field of a Mooncake trace")):
        load_trace(written(tmp_path, good, {"ts": 0, "events": []}))


ODD_VALUES = [None, True, -1, 2**63, 1.5, float("nan"), "", [], [[]], {}, [None], 2**26 + 1, "local"]
ODD_IN_JSON = [*ODD_VALUES, -(2**70), "\ud800"]


def damaged(value: Any, dice: random.Random, odd: list[Any]) -> Any:
    """Return a value of which one part, however deep, is missing or odd."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys or dice.random() < 0.1:
        return dice.choice(odd)
    changed, key = value.copy(), dice.choice(keys)
    if dice.random() < 0.2:
        del changed[key]
    else:
        changed[key] = damaged(changed[key], dice, odd)
    return changed


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, name: str) -> None:
    dice, num_refused, is_msgpack = random.Random(name), 0, "msgpack" in name
    odd, write = (ODD_VALUES, messages) if is_msgpack else (ODD_IN_JSON, json_lines)
    data = CASES[name].write(chats(1, CASES[name].tokens_per_id)[:6])
    values = [record.value for record in read_records(written(tmp_path, data))]
    for _ in range(60):
        rows = [damaged(each, dice, odd) if dice.random() < 0.3 else each for each in values]
        try:
            requests = load_trace(written(tmp_path, write(rows)))
        except ConfigError:
            num_refused += 1
            continue
        assert [each.timestamp_ms for each in requests] == sorted(each.timestamp_ms for each in requests)
        for each in requests:
            covered = each.tokens_per_id * len(each.hash_ids)
            assert covered - each.tokens_per_id < each.input_length <= covered
            assert all(0 <= number < 2**64 for number in each.hash_ids)
    assert 0 < num_refused < 60


def test_every_format_says_what_it_is() -> None:
    assert list(FORMATS) == [each.name for each in FORMATS.values()]
    assert {case.format_name for case in CASES.values()} == set(FORMATS)
    assert all(each.about for each in FORMATS.values())


def written(folder: Path, *values: Any) -> Path:
    """Write one value as it is if it is bytes, or else JSON lines."""
    file = folder / "trace.jsonl"
    file.write_bytes(values[0] if isinstance(values[0], bytes) else json_lines(list(values)))
    return file
