"""`radixkv doctor` for logs in files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from radixkv.model.tiny_files import write_tiny_files
from radixkv.service.cli.main import main
from tests.doctor.test_diagnosis import text_of
from tests.free_port import free_port
from tests.service.command_line import run_cli
from tests.service.fake_engine import FakeEngine

HEAD, TAIL, MORE = text_of(1, 400), text_of(2, 400), text_of(3, 400)
IDS = ("4f2a9c1", "b07e55d", "9c3d0a2")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = Path(tmp_path_factory.mktemp("tiny"))
    write_tiny_files(directory)
    return str(directory)


def write_log(tmp_path: Path, *records: Any) -> str:
    """Write records to a log with one JSON object per line; return its path."""
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["doctor", *arguments])
    return (code, *capsys.readouterr())


def prompts_with_ids() -> list[dict[str, Any]]:
    """Return three equal prompts, except for a random id between their two halves."""
    return [{"text": f"{HEAD} id: {each} {TAIL}"} for each in IDS]


def conversation(random_id: str, *more_messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return the body of an OpenAI request whose system message ends with an id."""
    messages = [
        {"role": "system", "content": f"{HEAD} id: {random_id}"},
        {"role": "user", "content": TAIL},
        *more_messages,
    ]
    return {"messages": messages, "model": "m", **fields}


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return what `radixkv doctor --json` prints."""
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_the_text_has_the_advice_and_the_tokens_that_it_saves(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = write_log(tmp_path, *prompts_with_ids())
    code, out, err = run(capsys, log, "--bytes", "--price-per-million-tokens", "1000")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    num_tokens = len(prompts_with_ids()[0]["text"])  # one per byte
    id_start = len(HEAD) + len(" id: ")
    saved_tokens = 2 * (num_tokens - 1 - id_start)  # by two prompts, of which the last token is always computed
    assert lines[0].startswith(f"3 requests with {3 * num_tokens:,} prompt tokens: ")
    assert lines[1] == "1 request reused nothing, and no earlier prompt with the same content was found."
    assert lines[3].startswith(f"1. 2 of 3 requests lose {len(TAIL):,} tokens on average at token {id_start}: ")
    assert lines[3].endswith(": a random id changes: 7 hexadecimal digits.")
    assert "[b07e55d]" in lines[4]
    assert lines[4].endswith(f"{log}:2")
    assert "[4f2a9c1]" in lines[5]
    assert lines[6].startswith("   -> Remove the id from the prompt")
    assert lines[7].startswith(f"   Saves {saved_tokens:,} tokens (")
    assert ", worth " in lines[7]


def test_a_log_without_losses_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = write_log(tmp_path, {"text": HEAD}, {"text": HEAD + TAIL})
    assert "No cause was found" in run(capsys, log, "--bytes")[1]


def test_token_ids_need_no_tokenizer_and_get_text_from_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tokenizer: str
) -> None:
    log = write_log(tmp_path, *({"token_ids": [*each["text"].encode()]} for each in prompts_with_ids()))
    code, out, err = run(capsys, log)
    assert code == 0
    assert "a passage changes" in out
    assert err.startswith("note: without --tokenizer")
    report = report_of(capsys, log, "--tokenizer", tokenizer)  # ids 0 to 255 of this tokenizer are the bytes
    assert [(each["cause"], each["pattern"]) for each in report["causes"]] == [("RANDOM_ID", "7 hexadecimal digits")]


@pytest.mark.parametrize("field", [None, "body", "request", "payload"])
def test_bodies_of_openai_requests_are_read_alone_or_in_a_field(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tokenizer: str, field: str | None
) -> None:
    bodies = [conversation(each, temperature=0.5, stream=True) for each in IDS]
    records = bodies if field is None else [{field: body, "tenant": "acme"} for body in bodies]
    log = write_log(tmp_path, *records)
    (cause,) = report_of(capsys, log, "--tokenizer", tokenizer)["causes"]
    assert (cause["cause"], cause["requests"], cause["segments"], cause["place"]) == (
        "RANDOM_ID",
        2,
        ["system"],
        "system",
    )


def test_bodies_of_requests_to_the_responses_api_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tokenizer: str
) -> None:
    call = {"type": "function_call", "name": "read", "arguments": "{}", "call_id": "1"}
    bodies = [
        {"instructions": f"{HEAD} id: {each}", "input": [{"role": "user", "content": TAIL}, call]} for each in IDS
    ]
    (cause,) = report_of(capsys, write_log(tmp_path, *bodies), "--tokenizer", tokenizer)["causes"]
    assert (cause["cause"], cause["requests"], cause["segments"]) == ("RANDOM_ID", 2, ["system"])


def test_bodies_of_anthropic_requests_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tokenizer: str
) -> None:
    def body(session: str, tool_names: str) -> dict[str, Any]:
        system = [{"type": "text", "text": HEAD, "cache_control": {"type": "ephemeral"}}]
        schemas = [
            {"name": name, "description": text_of(ord(name)), "input_schema": {"type": "object"}} for name in tool_names
        ]
        call = {"type": "tool_use", "id": "toolu_1", "name": "a", "input": {"path": "x"}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": TAIL}
        messages = [
            {"role": "user", "content": MORE},
            {"role": "assistant", "content": [{"type": "text", "text": "Yes."}, call]},
            {"role": "user", "content": [result]},
        ]
        metadata = {"user_id": f"user_1_account_2_session_{session}"}
        return {"system": system, "tools": schemas, "messages": messages, "max_tokens": 9, "metadata": metadata}

    log = write_log(tmp_path, body("one", "abc"), body("one", "bca"))
    (cause,) = report_of(capsys, log, "--tokenizer", tokenizer)["causes"]
    assert (cause["cause"], cause["pattern"]) == ("REORDERED", "tools")


def test_the_fields_of_a_record_decide_which_tokens_it_can_reuse(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ids = [*range(300)]
    records: list[dict[str, Any]] = [
        {
            "token_ids": ids,
            "tenant": "a",
            "salt": "x",
            "timestamp": "2026-11-05T10:32:11Z",
            "output_token_ids": [7] * 50,
        },
        {"token_ids": [*ids, *[7] * 49, 1], "tenant": "a", "salt": "x", "timestamp": 1_793_000_000_000},
        {"token_ids": ids, "tenant": "a", "cache_salt": "y", "adapter": "lora"},
        {"token_ids": ids, "tenant": "a", "cache_salt": "y", "adapter": "lora", "model": "other"},
        {"token_ids": ids, "tenant": "a", "salt": "x", "cached_tokens": 8, "miss_reason": "NO_WINDOW"},
        {
            "token_ids": [*range(50), 1000, *range(51, 300)],
            "tenant": "a",
            "salt": "x",
            "segments": [["rules", 60], ["rest", 300]],
        },
    ]
    report = report_of(capsys, write_log(tmp_path, *records))
    assert {(each["cause"], each["requests"], each["place"]) for each in report["causes"]} == {
        ("ADAPTER_CHANGED", 2, ""),
        ("NO_WINDOW", 1, ""),
        ("REPLACED", 1, "rules"),
    }
    # The second record continues the first one and its output, the fifth repeats the first, the sixth differs at 50.
    assert report["cached_tokens"] == 349 + 299 + 50


@pytest.mark.parametrize(
    ("record", "error"),
    [
        ({"answer": 1}, "expected a prompt in one of the fields"),
        ({"text": 1, "token_ids": [-1]}, "token_ids: expected a list of integers"),
        ({"token_ids": []}, "token_ids: expected at least one token id"),
        ({"token_ids": [1], "tenant": 7}, "tenant: expected text"),
        ({"token_ids": [1], "timestamp": "noon"}, "timestamp: expected seconds or ISO 8601"),
        ({"token_ids": [1], "timestamp": -1}, "timestamp: expected seconds of at least 0"),
        ({"token_ids": [1], "segments": [["a", 5], ["b", 2]]}, "segments: expected a list"),
        ({"token_ids": [1], "retention": {"priority": 101}}, "retention: expected an object"),
        ({"token_ids": [1], "cached_tokens": 1, "miss_reason": "WHY"}, "miss_reason: expected one of NONE"),
        ({"token_ids": [1], "cached_tokens": -1, "miss_reason": "NONE"}, "cached_tokens: expected an integer"),
        ({"token_ids": [1], "output_token_ids": "a"}, "output_token_ids: expected a list of integers"),
    ],
)
def test_a_wrong_record_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, record: dict[str, Any], error: str
) -> None:
    code, _, err = run(capsys, write_log(tmp_path, {"token_ids": [1, 2]}, record))
    assert code == 2
    assert "log.jsonl:2" in err
    assert error in err


def test_conversations_that_the_template_rejects_are_written_in_a_plain_form(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tokenizer: str
) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    bodies = [conversation(IDS[0]), conversation(IDS[1], image)]
    code, out, err = run(capsys, write_log(tmp_path, *bodies), "--tokenizer", tokenizer)
    assert code == 0
    assert "(system): a random id changes: 7 hexadecimal digits." in out
    assert err.startswith("note: conversations are written in a plain form")
    assert "log.jsonl:2: " in err


def test_texts_without_a_tokenizer_and_a_server_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, write_log(tmp_path, *prompts_with_ids()), "--address", f"127.0.0.1:{free_port()}")
    assert code == 2
    assert err.startswith("radixkv: --tokenizer: expected a tokenizer for the texts of the log, got none; ")


def test_texts_for_a_served_model_without_a_tokenizer_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run_cli(capsys, FakeEngine(), "doctor", write_log(tmp_path, *prompts_with_ids()))
    message = "the served model has no tokenizer; pass the tokenizer of the model, or --bytes for texts"
    assert (code, out, err) == (2, "", f"radixkv: --tokenizer: {message}\n")


def test_only_the_most_expensive_causes_are_replayed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = [{"text": f"{HEAD} id: {each} {TAIL} at 10:3{index} {MORE}"} for index, each in enumerate(IDS)]
    out = run(capsys, write_log(tmp_path, *prompts), "--bytes", "--top", "1")[1]
    assert "\n2. " not in out
    assert out.endswith("Further causes that cost less: 1; see --top.\n")


def test_a_time_model_converts_computed_and_saved_tokens_to_seconds(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    times = tmp_path / "times.json"
    times.write_text(json.dumps({"token_bytes": 1, "token_s": 0.5}))
    log = write_log(tmp_path, *prompts_with_ids())
    report = report_of(capsys, log, "--bytes", "--time-model", str(times))
    assert report["computed_s"] == report["computed_tokens"] * 0.5
    assert report["causes"][0]["saved_s"] == report["causes"][0]["saved_tokens"] * 0.5
    assert " of computing" in run(capsys, log, "--bytes", "--time-model", str(times))[1]


def test_an_empty_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, write_log(tmp_path))
    assert (code, "expected at least one prompt, got an empty file" in err) == (2, True)


def test_a_conversation_cannot_be_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, write_log(tmp_path, conversation("1")), "--bytes")
    assert (code, "expected a tokenizer for a conversation, got --bytes" in err) == (2, True)


def test_causes_in_a_trace_of_simulate_are_classified_by_position(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ids = [*range(40)]
    requests = [
        {"timestamp": 0, "input_length": 40 * 512, "output_length": 1, "hash_ids": ids, "session": "one"},
        {
            "timestamp": 9,
            "input_length": 40 * 512,
            "output_length": 1,
            "hash_ids": [*range(100, 140)],
            "session": "one",
        },
    ]
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(each) + "\n" for each in requests).encode()))
    code, out, err = run(capsys, str(path))
    assert code == 0
    assert "1 of 2 requests" not in out
    # 20,479 is 40 blocks of 512 tokens without the last token.
    assert (
        "1 request loses at most 20,479 tokens at token 0: the beginning of the session's previous prompt was changed."
        in out
    )
    assert "Costs up to 20,479 tokens" in out
    assert err.startswith("note: the trace has only ids of blocks")


def test_limit_reads_only_the_first_prompts_of_a_log(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert report_of(capsys, write_log(tmp_path, *prompts_with_ids()), "--bytes", "--limit", "2")["requests"] == 2


def test_a_capacity_below_a_block_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, err = run(capsys, write_log(tmp_path, *prompts_with_ids()), "--bytes", "--capacity-tokens", "63")
    assert (code, "--capacity-tokens: expected at least a block of 64 tokens, got 63" in err) == (2, True)
