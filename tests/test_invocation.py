"""Marks on tokens computed by invoked adapters."""

from __future__ import annotations

import pytest

from radixkv.errors import TooManyAdapters
from radixkv.invocation import MAX_INVOKED_ADAPTERS, MAX_INVOKED_VOCAB, InvocationMarks, strip_marks
from tests.fake_runner import tokens

IDS = [5, 0, MAX_INVOKED_VOCAB - 1, 7]


def test_tokens_before_the_invocation_are_unchanged() -> None:
    marks = InvocationMarks()
    marks.add("one")
    marked = marks.invocation("one", 2).marked(tokens(IDS))  # 4 bytes per token
    assert marked[:8] == tokens(IDS[:2])
    assert marked[8:] != tokens(IDS[2:])
    assert strip_marks(marked) == tokens(IDS)
    assert marks.num_plain(marked) == 2
    assert marks.digest_of(marked) == "one"
    assert marks.digest_of(marked[:8]) == ""


@pytest.mark.parametrize("start", [0, 1, 3])
def test_no_two_adapters_give_a_token_the_same_mark(start: int) -> None:
    marks = InvocationMarks()
    digests = [f"digest {number}" for number in range(300)]
    for digest in digests:
        marks.add(digest)
    marked_prompts = {marks.invocation(digest, start).marked(tokens(IDS)) for digest in digests}
    marked_tokens = {
        prompt[4 * position : 4 * position + 4] for prompt in marked_prompts for position in range(start, len(IDS))
    }
    assert len(marked_tokens) == len(digests) * (len(IDS) - start)
    assert {marks.digest_of(prompt) for prompt in marked_prompts} == set(digests)


def test_an_adapter_that_is_added_again_keeps_its_mark() -> None:
    marks = InvocationMarks()
    marks.add("one")
    first_mark = marks.invocation("one", 0).mark
    for digest in ("two", "one"):
        marks.add(digest)
    assert marks.invocation("one", 0).mark == first_mark
    assert marks.invocation("one", 0).mark != marks.invocation("two", 0).mark
    assert marks.has("one")
    assert not marks.has("three")


def test_unmarked_tokens_belong_to_the_base_model() -> None:
    huge = tokens([1, 2**32 - 1])
    assert InvocationMarks().digest_of(huge) == ""
    assert InvocationMarks().num_plain(huge) == 2


def test_marks_run_out_with_an_error() -> None:
    marks = InvocationMarks()
    for number in range(MAX_INVOKED_ADAPTERS):
        marks.add(str(number))
    last = marks.invocation(str(MAX_INVOKED_ADAPTERS - 1), 0).marked(tokens(IDS))
    assert strip_marks(last) == tokens(IDS)
    assert marks.digest_of(last) == str(MAX_INVOKED_ADAPTERS - 1)
    with pytest.raises(TooManyAdapters, match="until the next start"):
        marks.add("one more")
    marks.add("0")  # this adapter has a mark, so it can still be added
