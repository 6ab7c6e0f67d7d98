"""The report of `radixkv doctor`: the causes of misses of a running server, or of a log, and what to change."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from radixkv.doctor.advice import ADVICE
from radixkv.doctor.causes import MissCause
from radixkv.doctor.diagnosis import LogDiagnosis
from radixkv.doctor.finding import GroupKey, Sample, Side
from radixkv.doctor.miss_group import MissGroup
from radixkv.service.cli.terminal import align_columns, bracketed, duration, excerpt, percent, printable
from radixkv.v1.cache_pb2 import DiagnosedCause, DiagnoseResponse, MissSample
from radixkv.v1.explain_pb2 import Excerpt

_MAX_CHARS = 48  # of a text on either side of a difference


def server_diagnosis_text(response: DiagnoseResponse, price: float | None = None) -> str:
    """Return the diagnosis of a running server in lines, the most expensive cause first.

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
        headline = _headline(group, response.examined_misses, cause.what)
        tenant = f" Tenant {printable(cause.tenant, keep='')}." if cause.tenant else ""
        savings = _savings(group, response.examined_tokens, price, whole="what the examined ones computed")
        lines += ["", f"{number}. {headline}{tenant}", *_details(group, cause.change, savings)]
    if response.further_causes:
        lines += ["", f"Further causes that cost less: {response.further_causes:,}; see --top."]
    return "\n".join(lines)


def log_diagnosis_text(diagnosis: LogDiagnosis, price: float | None) -> str:
    """Return the diagnosis of a log, the most expensive cause first. `price` is as in `server_diagnosis_text`."""
    computed_tokens = diagnosis.computed_tokens
    seconds = "" if diagnosis.computed_s is None else f", which takes {duration(diagnosis.computed_s)}"
    lines = [
        f"{diagnosis.num_prompts:,} requests with {diagnosis.prompt_tokens:,} prompt tokens: "
        f"{diagnosis.cached_tokens:,} are reused{percent(diagnosis.cached_tokens, diagnosis.prompt_tokens)}, "
        f"{computed_tokens:,} are computed{seconds}.",
        f"{diagnosis.first_prompts:,} {'request' if diagnosis.first_prompts == 1 else 'requests'} reused nothing, and "
        "no earlier prompt with the same content was found.",
    ]
    if not diagnosis.groups:
        lines += ["", "No cause was found: the prompts reuse what they have in common with earlier ones."]
    for number, group in enumerate(diagnosis.groups, start=1):
        advice = ADVICE[group.key.cause]
        headline = _headline(group, diagnosis.num_prompts, advice.what)
        savings = _savings(group, computed_tokens, price, whole="all computed tokens")
        lines += ["", f"{number}. {headline}", *_details(group, advice.change, savings)]
    if diagnosis.num_other_groups:
        lines += ["", f"Further causes that cost less: {diagnosis.num_other_groups:,}; see --top."]
    return "\n".join(lines)


def log_diagnosis_object(diagnosis: LogDiagnosis, price: float | None) -> dict[str, Any]:
    """Return the diagnosis of a log for JSON."""
    return {
        "requests": diagnosis.num_prompts,
        "prompt_tokens": diagnosis.prompt_tokens,
        "cached_tokens": diagnosis.cached_tokens,
        "computed_tokens": diagnosis.computed_tokens,
        "computed_s": diagnosis.computed_s,
        "first_requests": diagnosis.first_prompts,
        "causes": [_group_object(each, price) for each in diagnosis.groups],
        "further_causes": diagnosis.num_other_groups,
    }


def _group_object(group: MissGroup, price: float | None) -> dict[str, Any]:
    advice = ADVICE[group.key.cause]
    saved_tokens = group.saved_tokens
    return {
        "cause": group.key.cause.value,
        "place": group.key.place,
        "pattern": group.key.pattern,
        "requests": group.num_prompts,
        "lost_tokens": group.lost_tokens,
        "lost_s": group.lost_s,
        "is_upper_bound": group.is_bound,
        "saved_tokens": saved_tokens,
        "saved_s": group.saved_s,
        "saved_money": None if price is None or saved_tokens is None else saved_tokens / 1e6 * price,
        "lost_money": None if price is None else group.lost_tokens / 1e6 * price,
        "min_position": group.min_position,
        "max_position": group.max_position,
        "segments": list(group.segments),
        "what": advice.what,
        "change": advice.change,
        "sample": None if group.sample is None else asdict(group.sample),
    }


def _headline(group: MissGroup, num_prompts: int, cause: str) -> str:
    """Return a sentence: how many requests lose how many tokens, where, and why.

    Args:
        group: the requests with the cause.
        num_prompts: number of all requests that were examined.
        cause: text about the cause.
    """
    mean_tokens, cause = group.lost_tokens // group.num_prompts, printable(cause, keep="")
    low, high = group.min_position, group.max_position
    place = f"at token {low:,}" if low == high else f"at tokens {low:,} to {high:,}"
    segments = ", ".join(printable(name, keep="") for name in group.segments)
    if group.key.pattern:
        cause += f": {printable(group.key.pattern, keep='')}"
    bound = "at most " if group.is_bound else ""
    mean = " on average" if group.num_prompts > 1 else ""
    losers = f"{group.num_prompts:,} of {num_prompts:,} requests lose" if group.num_prompts > 1 else "1 request loses"
    return f"{losers} {bound}{mean_tokens:,} tokens{mean} {place}{f' ({segments})' if segments else ''}: {cause}."


def _details(group: MissGroup, change: str, savings: str) -> list[str]:
    """Return the lines below the headline of a cause: both sides of a difference, what to change, and what it saves."""
    sides = [] if group.sample is None else _sides(group.sample)
    return [*sides, f"   -> {printable(change, keep='')}", f"   {savings}"]


def _sides(sample: Sample) -> list[str]:
    """Return both sides of a difference, a line each."""
    has_text = bool(sample.text_before or sample.prompt.text_after or sample.prompt.text or sample.earlier.text)
    before = excerpt(sample.text_before if has_text else sample.before_ids)[-_MAX_CHARS:]
    prompt, earlier = (before + _bracket(side, has_text=has_text) for side in (sample.prompt, sample.earlier))
    return align_columns(
        [("     prompt ", prompt, sample.where), ("     earlier", earlier, sample.earlier_where)],
    )


def _bracket(side: Side, *, has_text: bool) -> str:
    num_shown = side.num_different
    different = side.text if has_text else side.token_ids[:num_shown]
    equal = side.text_after if has_text else side.token_ids[num_shown:]
    is_cut = side.span is None or side.span > num_shown
    return bracketed(different, equal, is_cut=is_cut, max_chars=_MAX_CHARS)


def _savings(group: MissGroup, computed_tokens: int, price: float | None, *, whole: str) -> str:
    """Return what fixing a cause saves, or what it costs if that was not measured.

    Args:
        group: the prompts with the cause.
        computed_tokens: number of tokens of which the saved or lost tokens are shown as a share.
        price: price of a million computed tokens; None to print no money.
        whole: what the text calls the `computed_tokens`.
    """
    tokens, seconds = group.saved_tokens, group.saved_s
    if tokens is None:
        verb, tokens, seconds = "Costs up to" if group.is_bound else "Costs", group.lost_tokens, group.lost_s
    else:
        verb = "Saves"
    share = f" ({100 * tokens / computed_tokens:.1f} % of {whole})" if computed_tokens else ""
    computing = "" if seconds is None else f", {duration(seconds)} of computing"
    worth = "" if price is None else f", worth {tokens / 1e6 * price:,.2f}"
    return f"{verb} {tokens:,} tokens{share}{computing}{worth}."


def _group(cause: DiagnosedCause) -> MissGroup:
    names = {each.value for each in MissCause}
    # A newer server may report a cause that this client does not know. REPLACED is the most general one.
    kind = MissCause(cause.cause) if cause.cause in names else MissCause.REPLACED
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
