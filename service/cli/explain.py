"""`radixkv explain`: says where a prompt diverges from what is cached, what differs, and what to change."""

from __future__ import annotations

import argparse

from radixkv.service.cli.connection import add_connection, client_of
from radixkv.service.cli.options import add_options, flag
from radixkv.service.cli.output import json_of
from radixkv.service.cli.prompt import add_chat, add_namespace, add_tokens, prompt_of
from radixkv.service.cli.terminal import align_columns, bracketed, duration, excerpt, printable
from radixkv.v1.explain_pb2 import Difference, DifferenceKind, Excerpt, ExplainResponse
from radixkv.v1.prefill_pb2 import MissReason

_MAX_CHARS = 60  # of each shown text: before the difference, in it and after it

# What differs, and what the sender of the prompt can change.
_FINDINGS = {
    DifferenceKind.UNCLASSIFIED: (
        "After this position, the prompts have no long passage in common.",
        "If both belong to one conversation, send its earlier messages unchanged. If not, put what both have in common "
        "first.",
    ),
    DifferenceKind.RANDOM_ID: (
        "A random id differs.",
        "Remove the id from the prompt, keep one value for the whole conversation, or move it behind what should be "
        "reused.",
    ),
    DifferenceKind.DATE_OR_TIME: (
        "A date or a time differs.",
        "Move it to the end of the prompt, or round it so that it changes less often.",
    ),
    DifferenceKind.NUMBER: (
        "A number differs.",
        "Move the number to the end of the prompt, or leave it out if the model does not need it.",
    ),
    DifferenceKind.INSERTED: (
        "The prompt has a passage here that the cached one does not have.",
        "Append new messages at the end instead of inserting them before earlier ones.",
    ),
    DifferenceKind.REMOVED: (
        "The cached prompt has a passage here that this one does not have.",
        "Keep what was sent before. If the chat template removes the thinking of earlier turns, see "
        "write_generated=False in docs/AGENTS.md.",
    ),
    DifferenceKind.REORDERED: (
        "Both prompts have the same parts in a different order.",
        "Sort them before sending: tools by name, and the keys of JSON objects.",
    ),
    DifferenceKind.RETOKENIZED: (
        "The text is the same, but its tokens differ.",
        "Send the token ids of earlier turns as they were generated, or let one program encode all turns.",
    ),
    DifferenceKind.FIRST_TOKEN: (
        "The first token differs.",
        "Let all programs encode prompts alike, either all with the token that begins a sequence or all without it.",
    ),
    DifferenceKind.REPLACED: (
        "The prompts have different passages here.",
        "Move what changes to the end of the prompt. If the conversation was compacted, keep its first messages "
        "unchanged, and compact it less often.",
    ),
}


def add_arguments(explain: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    explain.description = (
        "Say where a prompt diverges from what is cached, what differs there, how many more tokens would be reused "
        "without the difference, and what to change. Nothing is computed. A prompt can be explained before it is sent, "
        "and afterwards until another request reuses the tokens that it cached."
    )
    add_tokens(explain)
    add_chat(explain)
    add_namespace(explain)
    add_options(explain, [flag("--omit-cached-text", "leave out the tokens and the text of the cached prompt")])
    add_connection(explain)
    explain.set_defaults(command=_explain)


def _explain(arguments: argparse.Namespace) -> None:
    with client_of(arguments) as client:
        prompt = prompt_of(arguments, client)
        response = client.explain(
            prompt.token_ids,
            tenant=arguments.tenant,
            adapter=arguments.adapter,
            salt=arguments.salt,
            omit_cached_text=arguments.omit_cached_text,
        )
    print(json_of(response) if arguments.json else explanation_text(response))


def explanation_text(response: ExplainResponse) -> str:
    """Return an explanation in a few lines: where the prompt diverges, both sides, the cost, and what to change."""
    cached = f"{response.cached_tokens:,} of {_tokens(response.prompt_tokens)} are cached"
    if response.miss_reason:
        cached += f" ({MissReason.Name(response.miss_reason)})"
    if not response.HasField("difference"):
        return f"{cached}. {_without_difference(response)}"
    difference = response.difference
    if response.cached_tokens > response.left_at_token:  # an earlier request has computed this prompt
        used_once = f"those after the first {response.left_at_token:,}" if response.left_at_token else "them"
        cached += f", but no other request has used {used_once}."
    else:
        cached += "."
    segment = f' in "{printable(response.segment, keep="")}"' if response.segment else ""
    if response.left_at_token:
        place = f"The prompt diverges from another cached prompt after {_tokens(response.left_at_token)}{segment}:"
    else:
        place = f"The prompt differs from other cached prompts in its first token{segment}:"
    finding, advice = _FINDINGS.get(difference.kind, _FINDINGS[DifferenceKind.UNCLASSIFIED])
    return "\n".join([cached, place, "", *_sides(difference), "", finding, _cost(response), f"-> {advice}"])


def _without_difference(response: ExplainResponse) -> str:
    """Return a sentence about a prompt for which the service found no difference from another cached prompt."""
    if not response.left_at_token:
        return "Nothing is cached for this tenant, adapter and salt that the prompt can be compared with."
    if response.left_at_token < response.prompt_tokens:
        return f"After {_tokens(response.left_at_token)} the prompt continues what is cached."
    return "The prompt does not diverge from any other cached prompt."


def _tokens(number: int) -> str:
    return f"{number:,} token{'' if number == 1 else 's'}"


def _sides(difference: Difference) -> list[str]:
    """Return both sides, with the differing part in brackets: as text, or as token ids if there is no text."""
    sides = [difference.prompt, difference.branch]
    has_text = bool(difference.before_text) or any(each.different_text or each.equal_text for each in sides)
    before = excerpt(difference.before_text if has_text else difference.before_token_ids)[-_MAX_CHARS:]
    rows: list[tuple[str, ...]] = [
        ("  prompt", before + _bracket(difference.prompt, difference.prompt_span_tokens, has_text=has_text))
    ]
    if difference.HasField("branch"):
        branch = before + _bracket(difference.branch, difference.branch_span_tokens, has_text=has_text)
        rows.append(("  cached", branch, f"used {duration(difference.idle_s)} ago"))
    return align_columns(rows)


def _bracket(side: Excerpt, span_tokens: int, *, has_text: bool) -> str:
    num_shown = side.different_tokens  # of the `span_tokens` that differ
    different = side.different_text if has_text else side.token_ids[:num_shown]
    equal = side.equal_text if has_text else side.token_ids[num_shown:]
    return bracketed(different, equal, is_cut=span_tokens > num_shown, max_chars=_MAX_CHARS)


def _cost(response: ExplainResponse) -> str:
    difference = response.difference
    if not difference.lost_tokens:
        return f"{_tokens(response.computed_tokens)} cannot be reused{_seconds(response, 'computed_s')}."
    return (
        f"The difference spans {_tokens(difference.prompt_span_tokens)} of the prompt and "
        f"{difference.branch_span_tokens:,} of the cached one.\n"
        f"The next {difference.lost_tokens:,} are equal, but cannot be reused{_seconds(difference, 'lost_s')}."
    )


def _seconds(message: ExplainResponse | Difference, field: str) -> str:
    return f" (about {getattr(message, field):.2g} s of computing)" if message.HasField(field) else ""
