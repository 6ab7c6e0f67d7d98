from __future__ import annotations

import re

import pytest

from radixkv.invocation import InvocationMarks
from radixkv.namespace import Namespace
from radixkv.offload.block_keys import BlockKeys, PromptKeys
from tests.fake_runner import tokens

from .tiered_bench import FORMAT

NAMESPACE = Namespace("model", "acme", "", "salt")
PROMPT = tokens(range(13))


def keys_of(prompt: bytes, namespace: Namespace = NAMESPACE, marks: InvocationMarks | None = None) -> list[bytes]:
    return [each.key for each in PromptKeys(BlockKeys(FORMAT), marks or InvocationMarks()).blocks(namespace, prompt)]


def mark_invocation(marks: InvocationMarks, digest: str, start: int, prompt: bytes = PROMPT) -> bytes:
    """Return a prompt in which the adapter with a digest computes the tokens from `start` on."""
    marks.add(digest)
    return marks.invocation(digest, start).marked(prompt)


def test_each_whole_block_has_the_key_of_its_chain() -> None:
    keys = BlockKeys(FORMAT)
    parents = [keys.root(NAMESPACE), *keys_of(PROMPT)]
    blocks = [PROMPT[start : start + 16] for start in (0, 16, 32)]
    assert keys_of(PROMPT) == [keys.child(parent, block) for parent, block in zip(parents, blocks, strict=False)]


def test_a_block_names_its_parent_tokens_and_owner() -> None:
    first, second, _ = PromptKeys(BlockKeys(FORMAT), InvocationMarks()).blocks(NAMESPACE, PROMPT)
    assert first.parent == BlockKeys(FORMAT).root(NAMESPACE)
    assert second.parent == first.key
    assert second.tokens == PROMPT[16:32]
    assert second.namespace == NAMESPACE


@pytest.mark.parametrize("digest", ["", "law"])
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_keys_that_continue_from_a_block_equal_those_from_the_start(digest: str, num_blocks: int) -> None:
    marks = InvocationMarks()
    prompt = mark_invocation(marks, digest, 6) if digest else PROMPT
    keys = PromptKeys(BlockKeys(FORMAT), marks)
    blocks = list(keys.blocks(NAMESPACE, prompt))
    assert list(keys.blocks(NAMESPACE, prompt[16 * num_blocks :], blocks[num_blocks - 1].key)) == blocks[num_blocks:]


@pytest.mark.parametrize("field", ["model", "tenant", "adapter", "salt"])
def test_namespaces_share_no_key(field: str) -> None:
    assert not set(keys_of(PROMPT)) & set(keys_of(PROMPT, NAMESPACE._replace(**{field: "another"})))


def test_keys_before_an_invocation_are_those_of_the_base_model() -> None:
    marks = InvocationMarks()
    assert keys_of(mark_invocation(marks, "law", 8), marks=marks)[:2] == keys_of(PROMPT)[:2]
    assert keys_of(mark_invocation(marks, "law", 8), marks=marks)[2] != keys_of(PROMPT)[2]


def test_keys_after_an_invocation_depend_on_the_adapter_and_on_its_start() -> None:
    marks = InvocationMarks()
    prompts = [
        PROMPT,
        *(mark_invocation(marks, digest, start) for digest in ("law", "tax") for start in (5, 6, 8)),
    ]
    keys = {key for prompt in prompts for key in keys_of(prompt, marks=marks)[1:]}  # of the second and the third block
    num_shared_keys = 2  # with an invocation at token 8, either adapter shares the second block with the plain prompt
    assert len(keys) == 2 * len(prompts) - num_shared_keys


def test_keys_do_not_depend_on_the_mark_of_an_adapter() -> None:
    """Adapters get their marks in the order in which they are loaded, which differs between processes."""
    first = InvocationMarks()
    second = InvocationMarks()
    second.add("another")
    ours = mark_invocation(first, "law", 6)
    theirs = mark_invocation(second, "law", 6)
    assert ours != theirs
    assert keys_of(ours, marks=first) == keys_of(theirs, marks=second)


def test_blocks_of_an_invoked_adapter_have_its_name_and_plain_tokens() -> None:
    marks = InvocationMarks()
    blocks = list(PromptKeys(BlockKeys(FORMAT), marks).blocks(NAMESPACE, mark_invocation(marks, "law", 6)))
    assert [each.namespace.adapter for each in blocks] == ["", "law", "law"]
    law = re.compile(BlockKeys(FORMAT).scope(None, "law", None).hex_pattern("."))
    assert [bool(law.match(each.key.hex())) for each in blocks] == [False, True, True], "a purge finds them"
    assert b"".join(each.tokens for each in blocks) == PROMPT[:48]
