"""Traces are read or refused with a reason, and their tokens are the same on every machine."""

from __future__ import annotations

import gzip
import json
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from radixkv.api.awaits import Awaits
from radixkv.errors import ConfigError
from radixkv.planning.trace import TraceRequest, block_tokens, load_trace, prompt_tokens, tokens_per_scaled_id

GOOD = {"timestamp": 27, "input_length": 700, "output_length": 52, "hash_ids": [0, 46]}


def line(**changes: object) -> str:
    """Return the line of the request `GOOD`, with these fields changed or added."""
    return json.dumps(GOOD | changes)


def write_trace(folder: Path, *lines: str) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def request(input_length: int, *hash_ids: int) -> TraceRequest:
    return TraceRequest(0, input_length, 1, hash_ids)


def test_requests_are_read_in_file_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_trace(tmp_path, line(), line(timestamp=27.5, input_length=1, hash_ids=[2**63 - 1]))
    assert load_trace(file) == [
        TraceRequest(timestamp_ms=27, input_length=700, output_length=52, hash_ids=(0, 46)),
        TraceRequest(timestamp_ms=27.5, input_length=1, output_length=52, hash_ids=(2**63 - 1,)),
    ]
    assert caplog.messages == []


def test_requests_out_of_order_are_sorted_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_trace(tmp_path, *(line(timestamp=time, output_length=time) for time in (5, 3, 9, 4, 9)))
    assert [(each.timestamp_ms, each.output_length) for each in load_trace(file)] == [
        (3, 3),
        (4, 4),
        (5, 5),
        (9, 9),
        (9, 9),
    ]
    assert caplog.messages == [
        f"trace {file}: 2 of 5 requests have an earlier timestamp than a request before them; they are sorted"
    ]


def test_a_missing_timestamp_or_output_length_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    untimed = json.dumps({"input_length": 700, "hash_ids": [0, 46]})
    file = write_trace(tmp_path, untimed, line(), untimed, line(timestamp=None, output_length=None), line(timestamp=99))
    assert [(each.timestamp_ms, each.output_length) for each in load_trace(file)] == [
        (0, 0),
        (27, 52),
        (27, 0),
        (27, 0),
        (99, 52),
    ]
    assert caplog.messages == [
        f"trace {file}: 3 of 5 requests have no timestamp; each gets that of the request before it"
    ]


def test_unix_timestamps_are_counted_from_the_first(tmp_path: Path) -> None:
    start = 1_764_000_000_000
    file = write_trace(tmp_path, line(timestamp=start + 10), line(timestamp=start + 25))
    assert [each.timestamp_ms for each in load_trace(file)] == [0, 15]


def test_whole_floats_are_integers(tmp_path: Path) -> None:
    file = write_trace(tmp_path, line(input_length=700.0, output_length=52.0, hash_ids=[0.0, 46.0]))
    assert load_trace(file) == load_trace(write_trace(tmp_path, line()))


def test_ids_of_any_kind_are_distinguished(tmp_path: Path) -> None:
    ids = [-1, "-1", 1, "1", 2**64 - 1, 2**64, 2**70, -(2**70), "a" * 99, "", "\x00", 46]
    file = write_trace(tmp_path, *(line(hash_ids=[each, 46]) for each in ids))
    read_ids = [each.hash_ids[0] for each in load_trace(file)]
    assert len(set(read_ids)) == len(ids)
    assert all(0 <= each < 2**64 for each in read_ids)
    assert [read_ids[index] for index in (2, 4, -1)] == [1, 2**64 - 1, 46], "integers of 64 bits are kept"
    assert read_ids == [each.hash_ids[0] for each in load_trace(file)]
    other_file = write_trace(tmp_path, line(hash_ids=["x", -1]), line(hash_ids=["x", "y"]))
    first, second = load_trace(other_file)
    assert first.hash_ids[0] == second.hash_ids[0]
    assert first.hash_ids[1] == read_ids[0], "-1 becomes the same id, whatever else is in the file"
    mixed, plain = load_trace(write_trace(tmp_path, line(hash_ids=[1, "x"]), line(hash_ids=[1, 2])))
    assert mixed.hash_ids[0] == plain.hash_ids[0] == 1, "whatever the other ids of the prompt are"


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path, pack) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(pack(b"\xef\xbb\xbf" + f"{line()}\r\n{line()}\r\n".encode()))
    assert len(load_trace(file)) == 2
    file.write_bytes(pack(b"\xef\xbb\xbf\r\n\r\n" + line().encode()))
    assert len(load_trace(file)) == 1


@pytest.mark.parametrize("tokens_per_id", [1, 16, 64, 128, 512, 1024, 65536])
def test_the_number_of_tokens_per_id_is_the_power_of_two_that_fits(tmp_path: Path, tokens_per_id: int) -> None:
    lengths_and_num_ids = [
        (3 * tokens_per_id - tokens_per_id // 2, 3),
        (tokens_per_id, 1),
        (2 * tokens_per_id, 2),
    ]
    file = write_trace(
        tmp_path,
        *(line(input_length=length, hash_ids=list(range(num_ids))) for length, num_ids in lengths_and_num_ids),
    )
    assert {each.tokens_per_id for each in load_trace(file)} == {tokens_per_id}


def test_the_number_of_tokens_per_id_can_be_given(tmp_path: Path) -> None:
    file = write_trace(tmp_path, line(input_length=250, hash_ids=[1, 2, 3]))
    assert [each.tokens_per_id for each in load_trace(file, tokens_per_id=100)] == [100]
    with pytest.raises(ConfigError, match="expected 101 to 150 tokens for 3 hash_ids of 50 tokens, got 250"):
        load_trace(file, tokens_per_id=50)
    with pytest.raises(ConfigError, match="tokens_per_id: expected 1 to 65536, got 65537"):
        load_trace(file, tokens_per_id=65537)


def test_the_unit_of_the_timestamps_can_be_given(tmp_path: Path) -> None:
    file = write_trace(tmp_path, line(timestamp=1.5))
    assert load_trace(file, timestamps="s")[0].timestamp_ms == 1500
    with pytest.raises(ConfigError, match="trace timestamps: expected one of ms, s, got us"):
        load_trace(file, timestamps="us")  # type: ignore[arg-type]


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace format: expected one of auto, weka, vllm, .* got azure"):
        load_trace(write_trace(tmp_path, line()), format_name="azure")


def test_the_number_of_ids_in_a_trace_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.planning.trace.MAX_TRACE_IDS", 4)
    file = write_trace(tmp_path, line(), line(), line())
    assert len(load_trace(file, limit=2)) == 2
    with pytest.raises(ConfigError, match=r":3: expected at most 4 ids in all, got more; read only the first 2 "):
        load_trace(file)


def test_unknown_fields_blank_lines_and_other_line_ends_are_fine(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_bytes(f"\n{line(model='m')}\r\n\n  \n{line()}".encode())
    assert len(load_trace(str(file))) == 2


def test_a_limit_stops_before_later_lines_are_read(tmp_path: Path) -> None:
    file = write_trace(tmp_path, line(), line(), "not JSON")
    assert len(load_trace(file, limit=2)) == 2


@pytest.mark.parametrize("name", ["trace.jsonl.gz", "trace.jsonl"])
def test_a_compressed_trace_is_read_whatever_its_name(tmp_path: Path, name: str) -> None:
    plain = write_trace(tmp_path, *[line(timestamp=n) for n in range(1000)])
    expected = load_trace(plain)
    packed = tmp_path / "packed" / name
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert load_trace(packed) == expected
    assert load_trace(packed, limit=3) == expected[:3]


@pytest.mark.parametrize("damage", ["cut", "changed", "not deflated"])
def test_a_damaged_compressed_trace_is_refused(tmp_path: Path, damage: str) -> None:
    packed = bytearray(gzip.compress("\n".join(line(timestamp=n) for n in range(1000)).encode()))
    if damage == "cut":
        del packed[len(packed) // 2 :]
    elif damage == "changed":
        packed[-8] ^= 1  # a bit of the checksum
    else:
        packed[10:20] = b"\xff" * 10
    file = tmp_path / "trace.jsonl.gz"
    file.write_bytes(packed)
    with pytest.raises(ConfigError, match=rf"^trace {file}: expected whole gzip data, got damage after "):
        load_trace(file)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_trace_can_be_read_from_a_pipe(tmp_path: Path, pack) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(pack(line().encode()),))
    writer.start()
    assert len(load_trace(pipe)) == 1
    writer.join()


@pytest.mark.parametrize("length", [513, 1024])
def test_the_last_id_may_be_filled_from_one_token_to_all(tmp_path: Path, length: int) -> None:
    assert load_trace(write_trace(tmp_path, line(input_length=length)))[0].input_length == length


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("not JSON", "expected a JSON object, got text that is not JSON"),
        ('{"timestamp": 1', "expected a JSON object, got text that is not JSON"),
        ("[" * 100_000, "expected a JSON object, got text that is not JSON"),
        ("[1, 2]", "expected a JSON object, got list [1, 2]"),
        ("7", "expected a JSON object, got int 7"),
        ('{"input_length": 7}', "hash_ids: expected this field of a Mooncake trace, got fields: input_length"),
        ("{}", "hash_ids: expected this field of a Mooncake trace, got fields: none"),
        (line().replace("input_", "in_"), "input_length: expected this field of a Mooncake trace"),
        (line(timestamp="now"), "timestamp: expected milliseconds of at least 0, got str 'now'"),
        (line(timestamp=-1), "timestamp: expected milliseconds of at least 0, got int -1"),
        (line(timestamp=True), "timestamp: expected milliseconds of at least 0, got bool True"),
        (line(timestamp=float("nan")), "timestamp: expected milliseconds of at least 0, got float nan"),
        (line(input_length=700.5), "input_length: expected an integer of at least 1, got float 700.5"),
        (line(input_length=2**26 + 1), "input_length: expected at most 67,108,864, got int 67108865"),
        (line(input_length="700"), "input_length: expected an integer of at least 1, got str '700'"),
        (line(input_length=0), "input_length: expected an integer of at least 1, got int 0"),
        (line(input_length=-700), "input_length: expected an integer of at least 1, got int -700"),
        (line(input_length=1025), "input_length: expected 513 to 1024 tokens for 2 hash_ids of 512 tokens, got 1025"),
        (line(input_length=512), "input_length: expected 513 to 1024 tokens for 2 hash_ids of 512 tokens, got 512"),
        (line(ttft_ms="3"), "ttft_ms: expected milliseconds of at least 0, got str '3'"),
        (line(ttft_ms=3, cached_length=701), "cached_length: expected at most 700, got int 701"),
        (line(ttft_ms=3, loaded_lengths=[]), "loaded_lengths: expected a JSON object, got"),
        (line(ttft_ms=3, loaded_lengths={"host": -1}), "loaded_lengths.host: expected an integer of at least 0"),
        (line(output_length=-1), "output_length: expected an integer of at least 0, got int -1"),
        (line(output_length=False), "output_length: expected an integer of at least 0, got bool False"),
        (line(hash_ids=[]), "hash_ids: expected a list of at least one id, got list []"),
        (line(hash_ids=46), "hash_ids: expected a list of at least one id, got int 46"),
        (line(hash_ids=[0, 46.5]), "hash_ids[1]: expected an integer or a string, got float 46.5"),
        (line(hash_ids=[0, True]), "hash_ids[1]: expected an integer or a string, got bool True"),
        (line(hash_ids=[None, 0]), "hash_ids[0]: expected an integer or a string, got NoneType None"),
        (line(hash_ids=[0, ["a" * 99]]), f"hash_ids[1]: expected an integer or a string, got list ['{'a' * 50}..."),
        (line(hash_ids=[0, float("inf")]), "hash_ids[1]: expected an integer or a string, got float inf"),
    ],
)
def test_a_bad_line_is_refused_with_its_number_and_field(tmp_path: Path, bad: str, message: str) -> None:
    file = write_trace(tmp_path, line(), "", bad, line())
    with pytest.raises(ConfigError, match=re.escape(f"{file}:3: {message}")):
        load_trace(file)


def test_binary_junk_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.zst"
    file.write_bytes(b"\x28\xb5\x2f\xfd\xff\xfe\n\x00")
    with pytest.raises(ConfigError, match=r"trace\.zst:1: expected a JSON object, got bytes that are not UTF-8 text"):
        load_trace(file)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match="expected at least one request, got an empty file"):
        load_trace(file)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: expected a readable file, got: No such file"):
        load_trace(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"expected a readable file, got: Is a directory"):
        load_trace(tmp_path)


def test_a_limit_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="limit: expected at least 1, got 0"):
        load_trace(write_trace(tmp_path, line()), limit=0)


@pytest.mark.parametrize(
    ("hash_id", "vocab_size", "expected"),
    [
        (0, 256, [167, 179, 99, 168]),
        (182_789, 256, [63, 243, 64, 33]),
        (0, 32_000, None),
        (2**63 - 1, 2**32, None),
    ],
)
def test_the_tokens_of_an_id_are_the_same_in_every_version(
    hash_id: int, vocab_size: int, expected: list[int] | None
) -> None:
    tokens = block_tokens(hash_id, tokens_per_id=4, vocab_size=vocab_size)
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == tokens_in_plain_integers(hash_id, 4, vocab_size)
    if expected is not None:
        assert tokens.tolist() == expected


def tokens_in_plain_integers(hash_id: int, num_tokens: int, vocab_size: int) -> list[int]:
    """Return the tokens of an id by splitmix64 in Python's integers, without numpy's arithmetic modulo 2**64."""
    gamma, mask = 0x9E3779B97F4A7C15, 2**64 - 1

    def mixed(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    stream = mixed((hash_id + 1) * gamma & mask)
    return [(mixed((stream + i * gamma) & mask) >> 32) * vocab_size >> 32 for i in range(1, num_tokens + 1)]


def test_a_shorter_block_is_a_prefix_of_a_longer_one() -> None:
    assert (block_tokens(46, tokens_per_id=17) == block_tokens(46, tokens_per_id=37)[:17]).all()


def test_different_ids_give_different_tokens() -> None:
    firsts = {block_tokens(hash_id, tokens_per_id=8).tobytes() for hash_id in range(1000)}
    assert len(firsts) == 1000


def test_tokens_cover_the_vocabulary_evenly_and_stay_below_it() -> None:
    counts = np.bincount(block_tokens(1, tokens_per_id=100_000, vocab_size=100), minlength=100)
    assert len(counts) == 100
    assert counts.min() > 800
    assert counts.max() < 1200


@pytest.mark.parametrize("vocab_size", [0, 2**32 + 1])
def test_a_vocabulary_out_of_range_is_refused(vocab_size: int) -> None:
    with pytest.raises(ConfigError, match=f"vocab_size: expected 1 to 4294967296, got {vocab_size}"):
        block_tokens(0, vocab_size=vocab_size)


def test_a_prompt_is_its_ids_tokens_in_order() -> None:
    tokens = prompt_tokens(request(700, 0, 46), vocab_size=256)
    assert tokens.dtype == np.uint32
    assert tokens[:512].tolist() == block_tokens(0, vocab_size=256).tolist()
    assert tokens[512:].tolist() == block_tokens(46, vocab_size=256)[:188].tolist()


@pytest.mark.parametrize(
    ("scale", "input_length", "num_ids", "expected"),
    [
        (1.0, 513, 2, 513),
        (1.0, 1024, 2, 1024),
        (0.5, 1024, 2, 512),
        (0.5, 513, 2, 257),  # the last id keeps at least one token
        (1 / 512, 1024, 2, 2),
        (1e-9, 1024, 2, 2),
        (37 / 512, 512 + 256, 2, 37 + 19),  # half of 37 is rounded up
        (2.0, 513, 2, 1026),
        (0.1, 1, 1, 1),
    ],
)
def test_prompts_are_scaled_id_by_id(scale: float, input_length: int, num_ids: int, expected: int) -> None:
    assert len(prompt_tokens(request(input_length, *range(num_ids)), vocab_size=256, scale=scale)) == expected


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_not_positive_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match=f"scale: expected a positive number, got {scale}"):
        prompt_tokens(request(1, 0), vocab_size=256, scale=scale)


@pytest.mark.parametrize("scale", [1.0, 0.3, 37 / 512, 1e-9])
def test_shared_ids_share_their_scaled_tokens(scale: float) -> None:
    rng = np.random.default_rng(0)

    def scaled_prompt(ids: list[int]) -> np.ndarray:
        """Return the scaled tokens of a prompt with these ids, of which the last one has 1 to 512 tokens."""
        input_length = 512 * len(ids) - int(rng.integers(0, 512))
        return prompt_tokens(request(input_length, *ids), vocab_size=2**32, scale=scale)

    for _ in range(50):
        num_shared, num_first_only, num_second_only = rng.integers(0, 5, 3).tolist()
        shared_ids, first_ids, second_ids = (
            rng.integers(0, 2**62, num_ids).tolist() for num_ids in (num_shared, num_first_only, num_second_only + 1)
        )
        first = scaled_prompt(shared_ids + first_ids or [1])
        second = scaled_prompt(shared_ids + second_ids)
        num_tokens = min(num_shared * tokens_per_scaled_id(scale), len(first), len(second))
        assert (first[:num_tokens] == second[:num_tokens]).all()


def test_of_two_prompts_with_equal_ids_the_shorter_is_a_prefix_of_the_longer() -> None:
    short, long = (prompt_tokens(request(n, 3, 4), vocab_size=256, scale=0.25) for n in (600, 900))
    assert len(short) < len(long)
    assert (short == long[: len(short)]).all()


def test_the_session_fields_of_a_trace_are_read(tmp_path: Path) -> None:
    first = {"timestamp": 1, "input_length": 600, "output_length": 500, "hash_ids": [1, 2], "output_hash_ids": [3, 4]}
    lines = [
        {**first, "session": "a1", "stop": "tool_use"},
        {"timestamp": 2, "input_length": 600, "hash_ids": [1, 5], "session": 7, "stop": "end_turn", "last": True},
        {"timestamp": 3, "input_length": 600, "hash_ids": [1, 6], "stop": "other"},
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    requests = load_trace(file)
    assert [(each.session, each.awaits, each.is_last, each.output_ids) for each in requests] == [
        ("a1", Awaits.TOOL, False, (3, 4)),
        ("7", Awaits.USER, True, ()),
        ("", Awaits.UNKNOWN, False, ()),
    ]


def test_the_last_request_of_an_agent_session_is_marked(tmp_path: Path) -> None:
    requests = [
        {"t": 9.0, "in": 64, "out": 1, "hash_ids": [1], "stop": "end_turn"},
        {"t": 1.0, "in": 64, "out": 1, "hash_ids": [1], "stop": "tool_use"},
    ]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"id": "x", "block_size": 64, "requests": requests}))
    assert [(each.awaits, each.is_last, each.session) for each in load_trace(file)] == [
        (Awaits.TOOL, False, "session 0"),
        (Awaits.USER, True, "session 0"),
    ]
