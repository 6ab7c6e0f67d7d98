"""What each cause means to the sender of the prompts, and what to change."""

from __future__ import annotations

from typing import NamedTuple

from radixkv.doctor.causes import MissCause


class Advice(NamedTuple):
    """The texts that `radixkv doctor` prints for a cause.

    Attributes:
        what: what differs or happens; a part of a sentence.
        change: what the sender, or the operator of the cache, can change.
    """

    what: str
    change: str


_APPEND = "Append new messages at the end instead of inserting them before earlier ones, and keep what was sent before."
_CAPACITY = "Find the capacity that your prompts need with `radixkv simulate`, or cache fewer of them (docs/AGENTS.md)."

ADVICE = {
    MissCause.RANDOM_ID: Advice(
        "a random id changes",
        "Remove the id from the prompt, keep one value for the whole conversation, or move it to the end.",
    ),
    MissCause.DATE_OR_TIME: Advice(
        "a date or a time changes",
        "Move it to the end of the prompt, or round it so that it changes less often.",
    ),
    MissCause.NUMBER: Advice(
        "a number changes", "Move the number to the end of the prompt, or leave it out if the model does not need it."
    ),
    MissCause.REORDERED: Advice(
        "the same parts come in another order",
        "Sort them before sending: tools by name, and the keys of JSON objects (sort_keys=True).",
    ),
    MissCause.TOOLS_CHANGED: Advice(
        "the set of tools or their definitions change",
        "Send all tools in every request, with the same definitions, and restrict their use with tool_choice.",
    ),
    MissCause.MESSAGE_INSERTED: Advice("a passage that only some prompts have precedes what they share", _APPEND),
    MissCause.COMPACTED: Advice(
        "earlier messages were summarized or dropped",
        "Keep the first messages unchanged, drop many messages at once, and do it less often.",
    ),
    MissCause.THINKING_STRIPPED: Advice(
        "the reasoning of earlier turns was removed",
        "Keep the reasoning in later prompts, or do not cache it (write_generated=False, docs/AGENTS.md).",
    ),
    MissCause.RETOKENIZED: Advice(
        "the text is the same, but its tokens differ",
        "Send the token ids of earlier turns as they were generated, or let one program encode all turns.",
    ),
    MissCause.TEMPLATE_CHANGED: Advice(
        "special tokens or the text of the chat template differ",
        "Let all programs use the same chat template with the same options, and the same token at the beginning.",
    ),
    MissCause.REPLACED: Advice(
        "a passage changes", "Move what changes to the end of the prompt, after everything that stays the same."
    ),
    MissCause.HEAD_CHANGED: Advice(
        "the beginning of the session's previous prompt was changed",
        "Keep system prompt and tools the same during a session. A log of the prompts would show what changes.",
    ),
    MissCause.MIDDLE_CHANGED: Advice(
        "the session's previous prompt was changed in the middle",
        "Send earlier messages unchanged. A log of the prompts would show what changes.",
    ),
    MissCause.REALIGNED: Advice(
        "blocks were inserted into the session's previous prompt, or removed from it",
        f"{_APPEND} A log of the prompts would show what changes.",
    ),
    MissCause.SALT_CHANGED: Advice(
        "the same tokens are cached with another salt of the tenant",
        "Use one salt for all requests that may share their prompts, not a different salt for each request.",
    ),
    MissCause.ADAPTER_CHANGED: Advice(
        "the same tokens are cached for another model or adapter, or for other weights of the adapter",
        "Keep one model and adapter for a conversation, replace the weights of adapters less often, or use an adapter "
        "that is invoked late in the prompt (radixkv/engine/adapters/README.md).",
    ),
    MissCause.TENANT_CHANGED: Advice(
        "the same tokens are cached for another tenant",
        "Send a conversation as one tenant. A system prompt of all tenants can be made public (`radixkv public add`).",
    ),
    MissCause.EVICTED: Advice("the tokens had been evicted", _CAPACITY),
    MissCause.EVICTED_BY_OWN: Advice("the tokens had been evicted for other prompts of the same tenant", _CAPACITY),
    MissCause.EVICTED_BY_OTHERS: Advice(
        "the tokens had been evicted for other tenants",
        f"Give the tenant a floor (tenants.NAME.floor_tokens). {_CAPACITY}",
    ),
    MissCause.EXPIRED: Advice(
        "the tokens were evicted after the time to live of their retention",
        "Request a longer time to live, or one that each hit restarts (renew=True).",
    ),
    MissCause.NO_WINDOW: Advice(
        "the tokens are cached, but not those of the layers with sliding windows",
        "Send prompts that end where later ones continue, or give these layers more memory (cache.windowed_tokens).",
    ),
    MissCause.NO_STATE: Advice(
        "the tokens are cached, but no snapshot of the recurrent state",
        "Take snapshots more often (cache.state_every_tokens), or keep more of them (cache.state_bytes).",
    ),
    MissCause.NOT_LOADED: Advice(
        "the tokens were in a tier and were not loaded", "See docs/RUNBOOK.md for tiers that are slow or not reachable."
    ),
    MissCause.READ_DISABLED: Advice("the request disabled reading from the cache", "Leave out read_cache=False."),
}
