"""The text of a diagnosis of a running server."""

from __future__ import annotations

from radixkv.doctor.causes import MissCause
from radixkv.doctor.finding import GroupKey, Sample, Side
from radixkv.doctor.miss_group import MissGroup
from radixkv.service.cli.miss_text import headline, savings, sides
from radixkv.service.cli.segments import duration
from radixkv.service.cli.terminal import percent, printable
from radixkv.v1.cache_pb2 import DiagnosedCause, DiagnoseResponse, MissSample
from radixkv.v1.explain_pb2 import Excerpt


def server_diagnosis_text(response: DiagnoseResponse, price: float | None = None) -> str:
    """Return the causes of misses in lines, the most expensive first.

    Args:
        response: the response of a server.
        price: price of a million computed tokens; None to print no money.
    """
    lines = [
        f"In the last {duration(response.covered_s)}, {response.prompts:,} prompts with {response.prompt_tokens:,} "
        f"tokens: {response.cached_tokens:,} were reused{percent(response.cached_tokens, response.prompt_tokens)}.",
        f"{response.misses:,} prompts missed and computed {response.missed_tokens:,} tokens. "
        f"{response.examined_misses:,} of them, with {response.examined_tokens:,} tokens, were examined; "
        f"{response.first_prompts:,} of these had nothing similar in the cache.",
    ]
    if not response.causes:
        lines += ["", "No cause was found: the examined prompts reuse what they have in common with earlier ones."]
    for number, cause in enumerate(response.causes, start=1):
        group = _group(cause)
        tenant = f" Tenant {printable(cause.tenant, keep='')}." if cause.tenant else ""
        lines += ["", f"{number}. {headline(group, response.examined_misses, cause.what)}{tenant}"]
        if group.sample is not None:
            lines += sides(group.sample)
        lines += [
            f"   -> {printable(cause.change, keep='')}",
            f"   {savings(group, response.examined_tokens, price, whole='what the examined ones computed')}",
        ]
    if response.further_causes:
        lines += ["", f"Further causes that cost less: {response.further_causes:,}; see --top."]
    return "\n".join(lines)


def _group(cause: DiagnosedCause) -> MissGroup:
    names = {each.value for each in MissCause}
    kind = MissCause(cause.cause) if cause.cause in names else MissCause.REPLACED  # a newer server has more causes
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
    prompt_span = sample.prompt_span_tokens if sample.HasField("prompt_span_tokens") else None
    branch_span = sample.branch_span_tokens if sample.HasField("branch_span_tokens") else None
    return Sample(
        tuple(sample.before_token_ids),
        sample.before_text,
        _side(sample.prompt, prompt_span),
        _side(sample.branch, branch_span),
        "",
        "",
    )


def _side(excerpt: Excerpt, span: int | None) -> Side:
    ids = tuple(excerpt.token_ids)
    return Side(ids, excerpt.different_tokens, excerpt.different_text, excerpt.equal_text, span)
