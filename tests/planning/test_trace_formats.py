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


class Turn(NamedTuple):
    """A request of a chat, before any format writes it down."""

    time_s: float
    session: int
    blocks: tuple[int, ...]  # the complete blocks of the prompt; equal numbers are equal blocks
    tail_tokens: int  # tokens after these blocks, which no other prompt shares


def chats(seed: int, tokens_per_id: int) -> list[Turn]:
    """Make chats that take turns at random: each turn appends blocks, and some branch off an earlier turn."""
    dice, new_blocks = random.Random(seed), iter(range(100, UNLIMITED))
    histories: list[list[tuple[int, ...]]] = [[(1, 2, 3)] for _ in range(8)]  # all begin with one system prompt
    turns = []
    for index in range(150):
        session = dice.randrange(len(histories))
        past = dice.choice(histories[session]) if dice.random() < 0.2 else histories[session][-1]
        blocks = (*past[:30], *(next(new_blocks) for _ in range(dice.randint(1, 4))))
        histories[session].append(blocks)
        turns.append(Turn(10.0 * index, session, blocks, dice.randrange(tokens_per_id)))
    return turns


def count_lru_hits(turns: Iterable[Turn], tokens_per_id: int, num_blocks: int) -> tuple[int, int]:
    """Count the tokens of all prompts, and those that an LRU cache of so many blocks reuses, with a dict of prefixes.

    A turn uses the prefixes of all its blocks, the shortest one last, so that the end of a prompt is evicted before its
    beginning. The tail of a prompt takes a block as well. At least one token is computed.
    """
    cache: OrderedDict[tuple[Any, ...], None] = OrderedDict()
    prompt_tokens = cached_tokens = 0
    for index, turn in enumerate(turns):
        length, _ = prompt_and_output_tokens(turn, tokens_per_id)
        prompt_tokens += length
        path = path_of(turn, index)
        if len(path) > num_blocks:
            continue
        prefixes = [path[:end] for end in range(1, len(path) + 1)]
        num_hits = next((end for end, prefix in enumerate(prefixes) if prefix not in cache), len(prefixes))
        cached_tokens += min(num_hits * tokens_per_id, length - 1)
        for prefix in reversed(prefixes):
            cache[prefix] = None
            cache.move_to_end(prefix)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return prompt_tokens, cached_tokens


def prompt_and_output_tokens(turn: Turn, tokens_per_id: int) -> tuple[int, int]:
    return len(turn.blocks) * tokens_per_id + turn.tail_tokens, 10 + turn.session


def path_of(turn: Turn, index: int) -> tuple[Any, ...]:
    """Return the blocks of a prompt, with one that no other turn has for its tail."""
    return (*turn.blocks, ("tail", index)) if turn.tail_tokens else turn.blocks


def mooncake(turns: list[Turn], tokens_per_id: int = 512) -> list[Any]:
    """Return the turns in the format of FAST25-release/traces, with times in milliseconds.

    The ids cover the whole prompt, and are numbered by first appearance.
    """
    numbers: dict[object, int] = {}
    rows = []
    for index, turn in enumerate(turns):
        ids = [numbers.setdefault(block, len(numbers)) for block in path_of(turn, index)]
        length, output = prompt_and_output_tokens(turn, tokens_per_id)
        time_ms = round(turn.time_s * 1000)
        rows.append({"timestamp": time_ms, "input_length": length, "output_length": output, "hash_ids": ids})
    return rows


def bailian(turns: list[Turn]) -> list[Any]:
    """Return the turns in the format of qwen-bailian-usagetraces-anon: ids of 16 tokens, times in seconds."""
    rows = []
    for chat_id, (turn, row) in enumerate(zip(turns, mooncake(turns, 16), strict=True)):
        own_fields = {"chat_id": chat_id, "parent_chat_id": -1, "type": "text", "turn": 1}
        rows.append({**own_fields, **row, "timestamp": turn.time_s})
    return rows


def dynamo_sessions(turns: list[Turn]) -> list[Any]:
    """Return the turns in the format of Dynamo's data generator.

    It has Mooncake's fields with ids of 64 tokens; later turns have a delay instead of a time.
    """
    rows, last_s = [], dict[int, float]()
    for turn, row in zip(turns, mooncake(turns, 64), strict=True):
        row["session_id"] = f"session-{turn.session}"
        if turn.session in last_s:
            del row["timestamp"]
            row["delay"] = 1000 * (turn.time_s - last_s[turn.session])
        last_s[turn.session] = turn.time_s
        rows.append(row)
    return rows


def dynamo_log(turns: list[Turn]) -> list[Any]:
    """Return the turns as in the log of Dynamo's frontend.

    It has 64-bit hashes of complete blocks and Unix times, and events of other kinds.
    """
    rows: list[Any] = []
    for index, turn in enumerate(turns):
        length, output = prompt_and_output_tokens(turn, 64)
        hashes = [(2**63 + 0x9E3779B97F4A7C15 * block) % 2**64 | 2**63 for block in turn.blocks]
        rows.append({"event_type": "request_payload", "request_id": f"r{index}"})
        request = {
            "request_id": f"r{index}",
            "model": "m",
            "input_tokens": length,
            "output_tokens": output,
            "request_received_ms": 1_764_000_000_000 + 1000 * turn.time_s,
            "replay": {"trace_block_size": 64, "input_length": length, "input_sequence_hashes": hashes},
        }
        rows.append(
            {
                "schema": "dynamo.request.trace.v1",
                "event_type": "request_end",
                "event_time_unix_ms": 1_764_000_000_500 + int(1000 * turn.time_s),
                "agent_context": {"session_id": f"s{turn.session}"},
                "request": request,
            }
        )
    return rows


def dynamo_plays(turns: list[Turn]) -> list[Any]:
    """Return the turns in the format agentic_mooncake of Dynamo: a header, and requests with ids local to a play."""
    source = {"format": "test", "digest": "0"}
    header = {
        "schema": "dynamo.agentic_mooncake",
        "version": 2,
        "block_size": 64,
        "hash_id_scope": "local",
        "source": source,
    }
    numbers: dict[tuple[int, int], int] = {}
    last_numbers: dict[int, int] = {}
    rows: list[Any] = [header]
    for index, turn in enumerate(turns):
        ids = []
        for block in turn.blocks:
            if (turn.session, block) not in numbers:
                last_numbers[turn.session] = last_numbers.get(turn.session, 0) + 1
                numbers[turn.session, block] = last_numbers[turn.session]
            ids.append(numbers[turn.session, block])
        length, output = prompt_and_output_tokens(turn, 64)
        rows.append(
            {
                "request_id": f"r{index}",
                "play_id": f"p{turn.session}",
                "session_id": "main",
                "model": "m",
                "input_length": length,
                "output_length": output,
                "hash_ids": ids,
                "not_before_ms": 1000 * turn.time_s,
                "dependencies": [],
            }
        )
    return rows


def weka(turns: list[Turn]) -> list[Any]:
    """Return the turns in the format of kv-cache-tester: a value per session, with local ids of complete blocks.

    Some requests are those of sub-agents, whose times count from the start of the sub-agent.
    """
    sessions: list[Any] = []
    for session in sorted({turn.session for turn in turns}):
        numbers: dict[int, int] = {}
        requests: list[Any] = []
        session_turns = [turn for turn in turns if turn.session == session]
        for index, turn in enumerate(session_turns):
            length, output = prompt_and_output_tokens(turn, 64)
            request: dict[str, Any] = {
                "t": turn.time_s,
                "type": "n" if index % 2 == 0 else "s",
                "model": "m",
                "in": length,
                "out": output,
                "hash_ids": [numbers.setdefault(block, len(numbers) + 1) for block in turn.blocks],
                "input_types": ["text"],
                "output_types": ["text"],
                "stop": "end_turn",
                "api_time": 1.5,
                "think_time": 0.0,
            }
            if index % 5 == 3:
                agent = {"t": turn.time_s, "type": "subagent", "agent_id": f"agent_{index}", "status": "completed"}
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


def vllm(turns: list[Turn], *, is_array: bool, hash_of: Callable[[int], Any]) -> list[Any]:
    """Return the `KVEventBatch`es of an engine whose cache never evicts.

    Of a prompt's new blocks, the first chunk of its prefill stores two, the second one, and the decode the others.
    """
    stored: set[tuple[int, ...]] = set()
    batches: list[Any] = []
    for turn in turns:
        num_stored = next(end for end in range(len(turn.blocks) + 1) if turn.blocks[: end + 1] not in stored)
        stored |= {turn.blocks[:end] for end in range(1, len(turn.blocks) + 1)}
        new_blocks = turn.blocks[num_stored:]
        for step, chunk in enumerate(filter(None, (new_blocks[:2], new_blocks[2:3], new_blocks[3:]))):
            parent = hash_of(turn.blocks[num_stored - 1]) if num_stored else None
            num_stored += len(chunk)
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
            time_s = 1_764_000_000 + turn.time_s + 0.5 * step
            batches.append([time_s, events, 0] if is_array else {"ts": time_s, "events": events})
    return batches


def by_session(turns: list[Turn]) -> list[Turn]:
    """Give equal blocks of different sessions different numbers, as formats with local ids do."""
    return [
        turn._replace(blocks=tuple((turn.session + 1) * UNLIMITED + block for block in turn.blocks)) for turn in turns
    ]


def without_tails(turns: list[Turn]) -> list[Turn]:
    return [turn._replace(tail_tokens=0) for turn in turns]


def json_lines(values: list[Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in values)


def msgpack_messages(values: list[Any]) -> bytes:
    return b"".join(msgpack.packb(each) for each in values)


def sha256_like(block: int) -> bytes:
    return block.to_bytes(32, "little")


class Case(NamedTuple):
    """A kind of trace file.

    Attributes:
        format_name: its key in `FORMATS`.
        tokens_per_id: tokens per id in the file.
        write: returns the contents of a file with the given turns.
        as_recorded: returns the turns without what such a file cannot express.
    """

    format_name: str
    tokens_per_id: int
    write: Callable[[list[Turn]], bytes]
    as_recorded: Callable[[list[Turn]], list[Turn]] = list


CASES = {
    "mooncake": Case("mooncake", 512, lambda turns: json_lines(mooncake(turns))),
    "mooncake of 64 tokens": Case("mooncake", 64, lambda turns: json_lines(mooncake(turns, 64))),
    "bailian": Case("bailian", 16, lambda turns: json_lines(bailian(turns))),
    "dynamo with sessions": Case("dynamo", 64, lambda turns: json_lines(dynamo_sessions(turns))),
    "dynamo's log": Case("dynamo", 64, lambda turns: json_lines(dynamo_log(turns))),
    "dynamo's plays": Case("dynamo", 64, lambda turns: json_lines(dynamo_plays(turns)), by_session),
    "weka, a session per line": Case("weka", 64, lambda turns: json_lines(weka(turns)), by_session),
    "weka, one document": Case("weka", 64, lambda turns: json.dumps(weka(turns), indent=1).encode(), by_session),
    "vllm, arrays": Case(
        "vllm",
        16,
        lambda turns: json_lines(vllm(turns, is_array=True, hash_of=lambda block: 2**63 + block)),
        without_tails,
    ),
    "vllm, maps": Case("vllm", 16, lambda turns: json_lines(vllm(turns, is_array=False, hash_of=str)), without_tails),
    "vllm, msgpack arrays": Case(
        "vllm", 16, lambda turns: msgpack_messages(vllm(turns, is_array=True, hash_of=sha256_like)), without_tails
    ),
    "vllm, msgpack maps": Case(
        "vllm",
        16,
        lambda turns: msgpack_messages(vllm(turns, is_array=False, hash_of=lambda block: -block)),
        without_tails,
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_hit_rates_of_lru_equal_an_independent_count(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    case = CASES[name]
    turns = chats(3, case.tokens_per_id)
    file = tmp_path / "trace"
    file.write_bytes(pack(case.write(turns)))
    requests = load_trace(file)
    assert requests == load_trace(file, format_name=case.format_name)
    assert {each.tokens_per_id for each in requests} == {case.tokens_per_id}
    assert [each.timestamp_ms for each in requests] == pytest.approx([1000 * turn.time_s for turn in turns])
    for num_blocks in (12, 60, 150, UNLIMITED):
        done = simulate(
            requests,
            policy="lru",
            capacity_tokens=num_blocks * case.tokens_per_id,
            block_size=case.tokens_per_id,
        )
        prompt_tokens, cached_tokens = count_lru_hits(case.as_recorded(turns), case.tokens_per_id, num_blocks)
        assert (done.prompt_tokens, done.cached_tokens) == (prompt_tokens, cached_tokens)
        assert cached_tokens > 0


@pytest.mark.parametrize("name", CASES)
def test_in_every_format_the_optimum_is_at_least_as_good_as_lru(tmp_path: Path, name: str) -> None:
    file = tmp_path / "trace"
    file.write_bytes(CASES[name].write(chats(4, CASES[name].tokens_per_id)))
    requests = load_trace(file)
    rates = {
        policy: simulate(requests, policy=policy, capacity_tokens=6000, block_size=16).token_hit_rate
        for policy in ("lru", "optimal")
    }
    assert 0 < rates["lru"] <= rates["optimal"]


def test_a_directory_of_sessions_is_one_trace(tmp_path: Path) -> None:
    turns = chats(5, 64)
    for number, session in enumerate(weka(turns)):
        (tmp_path / f"trace_{number:04}.json").write_text(json.dumps(session))
    (tmp_path / "README.md").write_text("not a trace")
    done = simulate(load_trace(tmp_path), policy="lru", capacity_tokens=64 * UNLIMITED, block_size=64)
    assert (done.prompt_tokens, done.cached_tokens) == count_lru_hits(by_session(turns), 64, UNLIMITED)


def test_global_ids_of_weka_are_shared_between_sessions(tmp_path: Path) -> None:
    request = {"t": 0, "type": "n", "in": 100, "out": 1, "hash_ids": [1]}
    session = {"block_size": 64, "hash_id_scope": "local", "requests": [request]}
    assert len({each.hash_ids[0] for each in load_trace(write_trace(tmp_path, session, session))}) == 2
    session["hash_id_scope"] = "global"
    assert len({each.hash_ids[0] for each in load_trace(write_trace(tmp_path, session, session))}) == 1


def test_sub_agents_of_weka_with_absolute_times_are_not_moved(tmp_path: Path) -> None:
    inner = [{"t": time, "type": "n", "in": 64, "out": 1, "hash_ids": [time]} for time in (20, 30)]
    agent = {"t": 20, "type": "subagent", "requests": inner}
    last = {"t": 25, "type": "n", "in": 64, "out": 1, "hash_ids": [25]}
    session = {"block_size": 64, "hash_id_scope": "global", "requests": [agent, last]}
    assert [each.hash_ids[0] for each in load_trace(write_trace(tmp_path, session))] == [20, 25, 30]


def test_times_of_a_weka_sub_agent_can_count_from_the_start_of_the_agent_that_started_it(tmp_path: Path) -> None:
    innermost = {"t": 5, "type": "subagent", "requests": [{"t": 6, "type": "n", "in": 64, "out": 1, "hash_ids": [16]}]}
    first = {"t": 0, "type": "n", "in": 64, "out": 1, "hash_ids": [10]}
    agent = {"t": 10, "type": "subagent", "requests": [first, innermost]}
    session = {"block_size": 64, "hash_id_scope": "global", "requests": [agent]}
    trace = load_trace(write_trace(tmp_path, session))
    assert [(each.hash_ids[0], each.timestamp_ms) for each in trace] == [(10, 10_000), (16, 16_000)]


@pytest.mark.parametrize("times", [(None, None, None), (0, 0, 0), (0, 1, 2)])
def test_the_last_request_of_a_weka_session_is_marked(tmp_path: Path, times: tuple[int | None, ...]) -> None:
    requests = [{"t": time, "type": "n", "in": 64, "out": 1, "hash_ids": [7]} for time in times]
    trace = load_trace(write_trace(tmp_path, {"block_size": 64, "requests": requests * 4}))
    assert [each.is_last for each in trace] == [False] * 11 + [True]


def test_short_prompts_of_weka_have_no_ids_and_share_nothing(tmp_path: Path) -> None:
    request = {"t": 0, "type": "n", "in": 40, "out": 1, "hash_ids": []}
    session = {"block_size": 64, "hash_id_scope": "global", "requests": [request, request]}
    first, second = load_trace(write_trace(tmp_path, session))
    assert first.hash_ids != second.hash_ids


def test_vllm_turns_are_requests_and_chunks_are_not(tmp_path: Path) -> None:
    def batch(time_s: float, *stored: tuple[list[str], str | None]) -> Any:
        return [time_s, [["BlockStored", hashes, parent, [], 16, None] for hashes, parent in stored], None]

    file = write_trace(
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
    assert load_trace(write_trace(tmp_path, event))[0].input_length == 64
    assert load_trace(write_trace(tmp_path, ["BlockStored", [1, 2], None, [], 32, None]))[0].input_length == 64


def test_only_one_kind_of_layers_counts_in_vllm_events(tmp_path: Path) -> None:
    events = [
        {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "block_size": 32, "group_idx": group}
        for group in (0, 1, 0)
    ]
    assert len(load_trace(write_trace(tmp_path, {"ts": 0, "events": events}))) == 2


def test_a_log_of_removed_blocks_has_no_requests(tmp_path: Path) -> None:
    file = write_trace(tmp_path, [0.0, [["AllBlocksCleared"], ["BlockRemoved", [1]]]])
    with pytest.raises(ConfigError, match="expected at least one request in the format vllm, got none"):
        load_trace(file)


def test_dynamo_lengths_may_count_complete_blocks_only(tmp_path: Path) -> None:
    rows = [{"session_id": "s", "input_length": n, "hash_ids": list(range(n // 64))} for n in (200, 500, 1000, 127)]
    assert {each.tokens_per_id for each in load_trace(write_trace(tmp_path, *rows))} == {64}


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
def test_invalid_traces_are_refused_with_the_reason_or_the_next_step(
    tmp_path: Path, values: list[Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_trace(write_trace(tmp_path, *values))


def test_a_later_record_of_another_format_is_refused(tmp_path: Path) -> None:
    good = mooncake(chats(0, 512))[0]
    with pytest.raises(ConfigError, match=re.escape(":2: hash_ids: expected this field of a Mooncake trace")):
        load_trace(write_trace(tmp_path, good, {"ts": 0, "events": []}))


ODD_VALUES = [None, True, -1, 2**63, 1.5, float("nan"), "", [], [[]], {}, [None], 2**26 + 1, "local"]
ODD_IN_JSON = [*ODD_VALUES, -(2**70), "\ud800"]


def damaged(value: Any, dice: random.Random, odd_values: list[Any]) -> Any:
    """Return a copy of a value of which one part, however deep, is missing or replaced by an odd value."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    if not keys or dice.random() < 0.1:
        return dice.choice(odd_values)
    changed, key = value.copy(), dice.choice(keys)
    if dice.random() < 0.2:
        del changed[key]
    else:
        changed[key] = damaged(changed[key], dice, odd_values)
    return changed


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_file_is_read_or_refused(tmp_path: Path, name: str) -> None:
    dice, num_refused = random.Random(name), 0
    odd_values, encode = (ODD_VALUES, msgpack_messages) if "msgpack" in name else (ODD_IN_JSON, json_lines)
    sound_file = write_trace(tmp_path, CASES[name].write(chats(1, CASES[name].tokens_per_id)[:6]))
    sound_values = [record.value for record in read_records(sound_file)]
    for _ in range(60):
        values = [damaged(each, dice, odd_values) if dice.random() < 0.3 else each for each in sound_values]
        try:
            requests = load_trace(write_trace(tmp_path, encode(values)))
        except ConfigError:
            num_refused += 1
            continue
        assert [each.timestamp_ms for each in requests] == sorted(each.timestamp_ms for each in requests)
        for each in requests:
            max_tokens = each.tokens_per_id * len(each.hash_ids)
            assert max_tokens - each.tokens_per_id < each.input_length <= max_tokens
            assert all(0 <= hash_id < 2**64 for hash_id in each.hash_ids)
    assert 0 < num_refused < 60


def test_every_format_has_its_name_a_description_and_a_case_above() -> None:
    assert list(FORMATS) == [each.name for each in FORMATS.values()]
    assert {case.format_name for case in CASES.values()} == set(FORMATS)
    assert all(each.about for each in FORMATS.values())


def write_trace(folder: Path, *values: Any) -> Path:
    """Write a file with one value of bytes, or else with a JSON line per value."""
    file = folder / "trace.jsonl"
    file.write_bytes(values[0] if isinstance(values[0], bytes) else json_lines(list(values)))
    return file
