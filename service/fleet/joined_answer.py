"""One answer of two replicas: what the first one tells of the prompt, and what the second one generates."""

from __future__ import annotations

from radixkv.v1 import prefill_pb2

_OF_PROMPT = (
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
    "public_tokens",
    "device_tokens",
    "host_tokens",
    "disk_tokens",
    "remote_tokens",
)


def joined(
    part: prefill_pb2.GenerateResponse, computed: prefill_pb2.PrefillResponse | None
) -> prefill_pb2.GenerateResponse:
    """Tell in a part of an answer what became of its prompt on the replica that computed it.

    The caller asked one fleet: what was reused is what that replica had cached. Times add up, and what both replicas
    have cached since.

    Args:
        part: of the replica that generates; changed in place.
        computed: of the one that computed the prompt; None if it is the same one.

    Returns:
        The part.
    """
    if computed is None or part.index or not part.HasField("usage"):
        return part
    for name in _OF_PROMPT:
        setattr(part.usage, name, getattr(computed.usage, name))
    part.usage.written_tokens += computed.usage.written_tokens
    if part.finished:
        part.miss_reason = computed.miss_reason
        part.timing.prefill_us += part.timing.queue_us + computed.timing.prefill_us
        part.timing.queue_us = computed.timing.queue_us
        part.timing.total_us += computed.timing.total_us
    return part
