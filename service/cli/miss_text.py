"""The text of a group of misses, for diagnoses of logs and of servers."""

from __future__ import annotations

from radixkv.doctor.finding import Sample, Side
from radixkv.doctor.miss_group import MissGroup
from radixkv.service.cli.segments import duration
from radixkv.service.cli.terminal import align_columns, excerpt, printable

_MAX_CHARS = 48  # of a text on either side of a difference


def headline(group: MissGroup, num_prompts: int, cause: str) -> str:
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


def sides(sample: Sample) -> list[str]:
    """Return both sides of a difference, a line each."""
    has_text = bool(sample.text_before or sample.prompt.text_after or sample.prompt.text or sample.earlier.text)
    before = excerpt(sample.text_before if has_text else sample.before_ids)[-_MAX_CHARS:]
    return align_columns(
        [
            (
                "     prompt ",
                before + _bracket(sample.prompt, has_text=has_text),
                printable(sample.where, keep=""),
            ),
            (
                "     earlier",
                before + _bracket(sample.earlier, has_text=has_text),
                printable(sample.earlier_where, keep=""),
            ),
        ]
    )


def _bracket(side: Side, *, has_text: bool) -> str:
    num_different = side.num_different
    different = excerpt(side.text if has_text else side.token_ids[:num_different])[:_MAX_CHARS]
    equal = excerpt(side.text_after if has_text else side.token_ids[num_different:])[:_MAX_CHARS]
    is_cut = side.span is None or side.span > num_different
    return f"[{different}{'...' if is_cut else ''}]{equal}"


def savings(group: MissGroup, computed_tokens: int, price: float | None, *, whole: str = "all computed tokens") -> str:
    """Return what fixing a cause saves, or what it costs if that was not measured.

    Args:
        group: the prompts with the cause.
        computed_tokens: number of tokens of which the saved or lost tokens are shown as a share.
        price: price of a million computed tokens; None to print no money.
        whole: name of these tokens in the text.
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
