"""What a running server has found out about its misses, as lines to read."""

from __future__ import annotations

from radixkv.doctor.causes import MissCause
from radixkv.doctor.finding import GroupKey, Sample, Side
from radixkv.doctor.miss_group import MissGroup
from radixkv.service.cli.miss_text import headline, savings, sides
from radixkv.service.cli.segments import duration
from radixkv.service.cli.terminal import percent, printable
from radixkv.v1.cache_pb2 import DiagnosedCause, DiagnoseResponse, MissSample
from radixkv.v1.explain_pb2 import Excerpt


def server_diagnosis_text(found: DiagnoseResponse, price: float | None = None) -> str:
    """Return the causes of misses in lines, the most expensive first.

    Args:
        found: the response of a server.
        price: price of a million computed tokens; None for none.
    """
    lines = [
        f"In the last {duration(found.covered_s)}, {found.prompts:,} prompts with {found.prompt_tokens:,} tokens: "
        f"{found.cached_tokens:,} were reused{percent(found.cached_tokens, found.prompt_tokens)}.",
        f"{found.misses:,} prompts missed and computed {found.missed_tokens:,} tokens. "
        f"{found.examined_misses:,} of them, with {found.examined_tokens:,} tokens, were examined; "
        f"{found.first_prompts:,} of these had nothing similar in the cache.",
    ]
    if not found.causes:
        lines += ["", "No cause was found: the examined prompts reuse what they have in common with earlier ones."]
    for number, cause in enumerate(found.causes, start=1):
        group = _group(cause)
        tenant = f" Tenant {printable(cause.tenant, keep='')}." if cause.tenant else ""
        lines += ["", f"{number}. {headline(group, found.examined_misses, cause.what)}{tenant}"]
        if group.sample is not None:
            lines += sides(group.sample)
        lines += [
            f"   -> {printable(cause.change, keep='')}",
            f"   {savings(group, found.examined_tokens, price, whole='what the examined ones computed')}",
        ]
    if found.further_causes:
        lines += ["", f"Further causes that cost less: {found.further_causes:,}; see --top."]
    return "\n".join(lines)


def _group(cause: DiagnosedCause) -> MissGroup:
    names = {each.value for each in MissCause}
    kind = MissCause(cause.cause) if cause.cause in names else MissCause.REPLACED  # of a newer server
    return MissGroup(
        GroupKey(kind, cause.place, cause.pattern),
        cause.prompts,
        cause.lost_tokens,
        cause.lost_s if cause.HasField("lost_s") else None,
        cause.min_position,
        cause.max_position,
        sample=_sample(cause.sample) if cause.HasField("sample") else None,
        is_bound=cause.is_upper_bound,
    )


def _sample(sample: MissSample) -> Sample:
    spans = [getattr(sample, name) if sample.HasField(name) else None for name in _SPANS]
    return Sample(
        tuple(sample.before_token_ids),
        sample.before_text,
        _side(sample.prompt, spans[0]),
        _side(sample.branch, spans[1]),
        "",
        "",
    )


_SPANS = ("prompt_span_tokens", "branch_span_tokens")


def _side(excerpt: Excerpt, span: int | None) -> Side:
    ids = tuple(excerpt.token_ids)
    return Side(ids, excerpt.different_tokens, excerpt.different_text, excerpt.equal_text, span)
