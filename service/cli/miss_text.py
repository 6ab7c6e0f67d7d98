"""A group of misses as lines to read; for diagnoses of logs and of servers."""

from __future__ import annotations

from radixkv.doctor.finding import Sample, Side
from radixkv.doctor.miss_group import MissGroup
from radixkv.service.cli.segments import duration
from radixkv.service.cli.terminal import aligned, printable

_MAX_CHARS = 48  # of a text on either side of a difference


def headline(group: MissGroup, num_prompts: int, what: str) -> str:
    """Return how many of some prompts lost how much, where, and because of what."""
    each, what = group.lost_tokens // group.num_prompts, printable(what, keep="")
    low, high = group.min_position, group.max_position
    place = f"at token {low:,}" if low == high else f"at tokens {low:,} to {high:,}"
    segments = ", ".join(printable(name, keep="") for name in group.segments)
    if group.key.pattern:
        what += f": {printable(group.key.pattern, keep='')}"
    bound = "at most " if group.is_bound else ""
    mean = " on average" if group.num_prompts > 1 else ""
    who = f"{group.num_prompts:,} of {num_prompts:,} requests lose" if group.num_prompts > 1 else "1 request loses"
    return f"{who} {bound}{each:,} tokens{mean} {place}{f' ({segments})' if segments else ''}: {what}."


def sides(sample: Sample) -> list[str]:
    """Return both sides of a difference, a line each."""
    has_text = bool(sample.text_before or sample.prompt.text_after or sample.prompt.text or sample.earlier.text)
    before = _shown(sample.text_before if has_text else sample.before_ids)[-_MAX_CHARS:]
    return aligned(
        [
            ("     prompt ", before + _marked(sample.prompt, has_text=has_text), printable(sample.where, keep="")),
            (
                "     earlier",
                before + _marked(sample.earlier, has_text=has_text),
                printable(sample.earlier_where, keep=""),
            ),
        ]
    )


def _marked(side: Side, *, has_text: bool) -> str:
    number = side.num_different
    different = _shown(side.text if has_text else side.token_ids[:number])[:_MAX_CHARS]
    equal = _shown(side.text_after if has_text else side.token_ids[number:])[:_MAX_CHARS]
    is_cut = side.span is None or side.span > number
    return f"[{different}{'...' if is_cut else ''}]{equal}"


def _shown(part: str | tuple[int, ...]) -> str:
    if isinstance(part, str):
        return part.replace("\n", "\\n")
    return f" {' '.join(map(str, part))} " if part else ""


def savings(group: MissGroup, computed: int, price: float | None, *, whole: str = "all computed tokens") -> str:
    """Return what fixing a cause saves, or what it costs if that was not measured.

    Args:
        group: the prompts with the cause.
        computed: tokens of which the share is shown.
        price: price of a million computed tokens; None for none.
        whole: what these tokens are.
    """
    tokens, seconds = group.saved_tokens, group.saved_s
    if tokens is None:
        verb, tokens, seconds = "Costs up to" if group.is_bound else "Costs", group.lost_tokens, group.lost_s
    else:
        verb = "Saves"
    share = f" ({100 * tokens / computed:.1f} % of {whole})" if computed else ""
    more = "" if seconds is None else f", {duration(seconds)} of computing"
    more += "" if price is None else f", worth {tokens / 1e6 * price:,.2f}"
    return f"{verb} {tokens:,} tokens{share}{more}."
