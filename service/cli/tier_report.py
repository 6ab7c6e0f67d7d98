"""The group of `radixkv plan` about stores below the device: their room, and whether loading beats computing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from radixkv.offload.load_or_compute import LoadOrCompute
from radixkv.planning.plan import GB, load_us
from radixkv.planning.tiers import TierRoom
from radixkv.service.cli.plan_report import Group

_MOST_BLOCKS = 2**13  # in one run; what pays in no run of that length is said never to pay
_FAR_BLOCKS = 1024


@dataclass(frozen=True, slots=True)
class TierLink:
    """The speed of a store.

    Attributes:
        bytes_per_s: its bandwidth.
        latency_s: time of a call beside that.
    """

    bytes_per_s: float
    latency_s: float = 0.0


def tier_group(
    rooms: Sequence[TierRoom],
    links: Sequence[TierLink],
    *,
    block_size: int,
    token_bytes: int,
    tokens_per_s: float | None,
) -> Group:
    """Return a line for each store.

    Args:
        rooms: of the stores.
        links: of the stores, in the same order.
        block_size: tokens a block.
        token_bytes: K and V of a token.
        tokens_per_s: tokens that a prefill computes; None if that is not known.
    """
    block_bytes = block_size * token_bytes
    compute_us = None if tokens_per_s is None else block_size / tokens_per_s * 1e6
    rows: list[tuple[str, ...]] = [("", "tokens", "load a block", "compute it", "same time at", "loading pays")]
    fields: dict[str, int | float | None] = {}
    for room, link in zip(rooms, links, strict=True):
        transfer_us = load_us(block_bytes, link.bytes_per_s)
        least = None
        if tokens_per_s is not None:
            least = least_loaded_blocks(link, block_bytes, block_size, tokens_per_s)
        latency = f" + {link.latency_s * 1e3:g} ms a call" if link.latency_s else ""
        rows.append(
            (
                room.name,
                "unbounded" if room.capacity_tokens is None else f"{room.capacity_tokens:,}",
                f"{transfer_us:,.1f} us, {link.bytes_per_s / GB:g} GB/s{latency}",
                "?" if compute_us is None else f"{compute_us:,.1f} us",
                f"{link.bytes_per_s / token_bytes:,.0f} tokens/s",
                _verdict(tokens_per_s, least, block_size),
            )
        )
        fields |= {
            f"tier_{room.name}_capacity_tokens": room.capacity_tokens,
            f"tier_{room.name}_load_us_per_block": transfer_us,
            f"tier_{room.name}_compute_us_per_block": compute_us,
            f"tier_{room.name}_latency_us": link.latency_s * 1e6,
            f"tier_{room.name}_break_even_tokens_per_s": link.bytes_per_s / token_bytes,
            f"tier_{room.name}_least_loaded_tokens": None if least is None else least * block_size,
        }
    return Group(f"tiers, blocks of {block_size} tokens", rows, fields)


def least_loaded_blocks(link: TierLink, block_bytes: int, block_size: int, tokens_per_s: float) -> int | None:
    """Return the shortest run of blocks that the engine would load; None if it would always compute.

    The engine's own `LoadOrCompute` decides, after it has measured these rates.
    """
    choice = LoadOrCompute(block_size)
    choice.note_step(block_size / tokens_per_s, [(0, block_size)])
    for num_blocks in (1, _FAR_BLOCKS):
        choice.note_start("tier", num_blocks)
        choice.note_end("tier", num_blocks, link.latency_s + num_blocks * block_bytes / link.bytes_per_s)
    least = 1 + bisect_left(
        range(1, _MOST_BLOCKS + 1), 1, key=lambda length: min(1, choice.choose(0, ["tier"] * length).num_blocks)
    )
    return least if least <= _MOST_BLOCKS else None


def _verdict(tokens_per_s: float | None, least: int | None, block_size: int) -> str:
    if tokens_per_s is None:
        return "below that rate"
    if least is None:
        return "never"
    return "always" if least == 1 else f"from {least * block_size:,} tokens on"
