"""The causes of the differences that users report (`SHAPES`), with a token per character and with a real tokenizer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from radixkv.doctor.causes import MissCause
from radixkv.doctor.diagnosis import diagnose
from radixkv.doctor.examination import Examiner
from radixkv.doctor.finding import Finding
from radixkv.doctor.prompt_log import LoggedPrompt, PromptLog
from tests.explain.shapes import ANSWER, ENCODINGS, NEXT, RULES, SHAPES, TASK, Encoding, encoding_named

from .logs import ACME, characters

CAUSES = {
    "build suffix in the first line": (MissCause.RANDOM_ID, "3 hexadecimal digits"),
    "uuid of a session": (MissCause.RANDOM_ID, "a UUID"),
    "base62 id of a call": (MissCause.RANDOM_ID, "23 letters and digits"),
    "hash of a commit": (MissCause.RANDOM_ID, "7 hexadecimal digits"),
    "ISO timestamp": (MissCause.DATE_OR_TIME, "a date and a time"),
    "ISO date": (MissCause.DATE_OR_TIME, "a date"),
    "date in words": (MissCause.DATE_OR_TIME, "a date and a time"),
    "another month": (MissCause.DATE_OR_TIME, "a date"),
    "time of day": (MissCause.DATE_OR_TIME, "a time"),
    "Unix time": (MissCause.DATE_OR_TIME, "a Unix time"),
    "counter": (MissCause.NUMBER, ""),
    "version": (MissCause.NUMBER, ""),
    "amount": (MissCause.NUMBER, ""),
    "tools in another order": (MissCause.REORDERED, "tools"),
    "last tool first": (MissCause.REORDERED, "tools"),
    "keys in another order": (MissCause.REORDERED, "keys of JSON objects"),
    "a tool less": (MissCause.TOOLS_CHANGED, ""),
    "a tool more": (MissCause.TOOLS_CHANGED, ""),
    "injected message": (MissCause.MESSAGE_INSERTED, ""),
    "injected message that comes again later": (MissCause.MESSAGE_INSERTED, ""),
    "stripped thinking": (MissCause.THINKING_STRIPPED, ""),
    "thinking that leaves its tags": (MissCause.THINKING_STRIPPED, ""),
    "compaction that keeps the last turns": (MissCause.COMPACTED, ""),
    "compaction": (MissCause.COMPACTED, ""),
    "another sentence": (MissCause.REPLACED, ""),
    "another question": None,
}


@pytest.fixture(scope="module", params=ENCODINGS)
def encoding(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Encoding:
    return encoding_named(request.param, tmp_path_factory.mktemp("tiny"))


def finding_of(
    prompt: Sequence[int],
    earlier: Sequence[int],
    decode: Callable[[Sequence[int]], str] | None,
    session: str = "one",
    segment: str = "",
) -> Finding | None:
    """Return why a prompt does not reuse an earlier one, which is the only other prompt of the log."""
    with PromptLog() as log:
        for ids in (earlier, prompt):
            segment_of = (lambda position: segment) if segment else None
            log.add(LoggedPrompt("log", len(ids), ACME, session, segment_of=segment_of), ids)
        return diagnose(log, Examiner(decode), min_lost_tokens=16, max_groups=0).findings[1]


def cause_of(*arguments: object, **options: str) -> MissCause | None:
    finding = finding_of(*arguments, **options)  # type: ignore[arg-type]
    return None if finding is None else finding.key.cause


@pytest.mark.parametrize("name", SHAPES)
def test_a_reported_difference_has_the_right_cause(name: str, encoding: Encoding) -> None:
    prompt, earlier, _ = SHAPES[name]
    encode, decode = encoding
    finding = finding_of(encode(prompt), encode(earlier), decode)
    assert (None if finding is None else (finding.key.cause, finding.key.pattern)) == CAUSES[name]


@pytest.mark.parametrize("name", [name for name in SHAPES if "compaction" not in name])
def test_the_cause_does_not_depend_on_which_prompt_was_first(name: str, encoding: Encoding) -> None:
    earlier, prompt, _ = SHAPES[name]
    encode, decode = encoding
    finding = finding_of(encode(prompt), encode(earlier), decode)
    assert (None if finding is None else (finding.key.cause, finding.key.pattern)) == CAUSES[name]


def test_a_summary_is_a_compaction_without_the_names_of_sessions(encoding: Encoding) -> None:
    prompt, earlier, _ = SHAPES["compaction that keeps the last turns"]
    encode, decode = encoding
    assert cause_of(encode(prompt), encode(earlier), decode, session="") is MissCause.COMPACTED


def test_earlier_messages_that_a_session_drops_are_a_compaction() -> None:
    rng = random.Random(1)
    turns = [[rng.randrange(97, 123) for _ in range(60)] for _ in range(30)]
    rules = [ord(each) for each in RULES]
    prompt, earlier = ([*rules, *itertools.chain(*kept_turns)] for kept_turns in (turns[20:], turns[:29]))
    assert cause_of(prompt, earlier, characters) is MissCause.COMPACTED
    assert cause_of(prompt, earlier, characters, session="") is MissCause.MESSAGE_INSERTED


def test_the_same_text_in_other_tokens_is_retokenized() -> None:
    pieces = {1: "flu", 2: "sh", 3: "flush"}

    def decode(ids: Sequence[int]) -> str:
        return "".join(pieces.get(each) or chr(each) for each in ids)

    before, after = ([ord(each) for each in text] for text in (RULES, ANSWER + NEXT))
    assert cause_of([*before, 3, *after], [*before, 1, 2, *after], decode) is MissCause.RETOKENIZED


@pytest.mark.parametrize("special_ids", [[1], [], [1, 4, 5], [*map(ord, "[INST] ")]])
@pytest.mark.parametrize("position", [0, 40])
def test_other_special_tokens_are_a_change_of_the_template(special_ids: list[int], position: int) -> None:
    text = [ord(each) for each in RULES + TASK]

    def decode(ids: Sequence[int]) -> str:
        return "".join(chr(each) for each in ids if each > 9)  # special tokens have no text

    prompt = [*text[:position], *special_ids, *text[position:]]
    earlier = [*text[:position], 2, *text[position:]]
    assert cause_of(prompt, earlier, decode) is MissCause.TEMPLATE_CHANGED


def test_other_tags_around_the_same_messages_are_a_change_of_the_template() -> None:
    messages = (RULES, TASK, ANSWER, NEXT)
    chatml = "".join(f"<|im_start|>user\n{each}<|im_end|>\n" for each in messages)
    llama = "".join(f"<|start_header_id|>user<|end_header_id|>\n\n{each}<|eot_id|>" for each in messages)
    prompt, earlier = ([ord(each) for each in text] for text in (llama, chatml))
    finding = finding_of(prompt, earlier, characters)
    assert finding is not None
    assert finding.key.cause is MissCause.TEMPLATE_CHANGED
    assert finding.lost_tokens > 0.9 * sum(map(len, messages))  # after all of the tags, not only after the first ones


def test_a_segment_decides_what_the_text_does_not_show() -> None:
    prompt, earlier, _ = SHAPES["another sentence"]
    ids = [[ord(each) for each in text] for text in (prompt, earlier)]
    assert cause_of(*ids, characters, segment="tools") is MissCause.TOOLS_CHANGED
    assert cause_of(*ids, characters, segment="template") is MissCause.TEMPLATE_CHANGED


def test_without_text_the_tokens_show_what_was_moved_or_is_in_one_prompt_only() -> None:
    for name, cause in {
        "injected message": MissCause.MESSAGE_INSERTED,
        "tools in another order": MissCause.REORDERED,
        "uuid of a session": MissCause.REPLACED,
        "compaction that keeps the last turns": MissCause.COMPACTED,
    }.items():
        ids = [[ord(each) for each in text] for text in SHAPES[name][:2]]
        assert cause_of(*ids, None) is cause


def test_other_text_that_is_longer_than_what_follows_is_no_cause() -> None:
    shared, tail = [ord(each) for each in RULES], [ord(each) for each in NEXT]
    ours, theirs = list(range(1000, 1200)), list(range(2000, 2200))
    assert cause_of([*shared, *ours, *tail], [*shared, *theirs, *tail], characters, session="") is None
    assert (
        cause_of([*shared, *ours[:50], *tail], [*shared, *theirs[:50], *tail], characters, session="")
        is MissCause.REPLACED
    )


def test_thinking_in_one_prompt_only_is_stripped_thinking_whatever_it_says() -> None:
    thinking = "<think>\nSee the summary of the conversation so far.\n</think>\n"
    ids = [[ord(each) for each in text] for text in (RULES + TASK + NEXT, RULES + TASK + thinking + NEXT)]
    assert cause_of(*ids, characters) is MissCause.THINKING_STRIPPED
