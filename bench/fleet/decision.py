"""Times routing decisions in a fleet that has many cached blocks, in CPU time of the thread that decides."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bench.fleet.replica_blocks import ReplicaBlocks
from radixkv.api.events import HASH_BYTES, AllCleared, BlocksRemoved, BlocksStored, EventBatch, SnapshotPart
from radixkv.events.block_identity import Identities
from radixkv.namespace import Namespace
from radixkv.routing.fleet_load import FleetLoad
from radixkv.routing.fleet_view import FleetView
from radixkv.routing.policies import make_routing
from radixkv.routing.prefix_demand import PrefixDemand
from radixkv.routing.prompt_blocks import PromptBlocks
from radixkv.routing.router import Route, Router

_NAMESPACE = Namespace("bench")
_SYSTEM_TOKENS = 1024  # the common beginning of all prompts, cached on all replicas
_NEW_TOKENS = 512  # per turn
_NUM_IN_FLIGHT = 256
_SEED = 0  # of tokens and order
_CONTINUED_SHARE = 0.7  # of the requests
_SNAPSHOT_BLOCKS = 512


@dataclass(frozen=True, slots=True)
class DecisionTimes:
    """The times of decisions with prompts of one length.

    Attributes:
        replicas: number of replicas.
        known_blocks: distinct blocks that the router knew before the first decision.
        end_blocks: the same after the last decision. It may include blocks that were expected on a replica, but no
            longer are.
        refused_blocks: number of times that the router's view refused a block because it was full.
        block_size: tokens per block.
        prompt_tokens: length of each prompt.
        decisions: number of decisions.
        p50_us, p99_us, max_us: CPU time to choose a replica.
        remember_p50_us, remember_p99_us: CPU time to record the choice, after it was returned to the caller.
        event_us: mean CPU time to read the batch of events of one request, which arrives after each decision.
    """

    replicas: int
    known_blocks: int
    end_blocks: int
    refused_blocks: int
    block_size: int
    prompt_tokens: int
    decisions: int
    p50_us: float
    p99_us: float
    max_us: float
    remember_p50_us: float
    remember_p99_us: float
    event_us: float


class ConversationPrompts:
    """Prompts of conversations: a shared system prompt, and the tokens of each conversation.

    Args:
        prompt_tokens: length of a prompt before the next turn.
        seed: seed of the tokens.
    """

    def __init__(self, prompt_tokens: int, seed: int) -> None:
        self._own_tokens = prompt_tokens - _SYSTEM_TOKENS
        self._seed = seed
        self._system = np.random.default_rng(seed).integers(2**32, size=_SYSTEM_TOKENS, dtype=np.uint32)

    def prompt(self, conversation: int, num_turns: int = 0) -> bytes:
        """Return the tokens of a conversation, as bytes."""
        draw = np.random.default_rng((self._seed, conversation))
        own = draw.integers(2**32, size=self._own_tokens + num_turns * _NEW_TOKENS, dtype=np.uint32)
        return np.concatenate((self._system, own)).tobytes()


def time_decisions(
    *, replicas: int, num_blocks: int, block_size: int, prompt_tokens: int, decisions: int
) -> DecisionTimes:
    """Fill a router's view by events, then time decisions while events continue.

    Seven of ten requests continue a conversation of which a replica has cached the earlier turns, apart from evicted
    blocks; the other requests share only the system prompt. After each decision, the events of one request are read:
    the blocks that its replica stored, and as many that it removed.

    Args:
        replicas: number of replicas.
        num_blocks: number of blocks that the router knows, about the same number for each replica.
        block_size: tokens per block.
        prompt_tokens: length of a prompt before its last turn.
        decisions: number of decisions.
    """
    conversations, identities = ConversationPrompts(prompt_tokens, _SEED), Identities("")
    router = Router(FleetView(block_size), FleetLoad(), PrefixDemand(), make_routing("prefix"), identities=identities)
    held = _fill(router, conversations, identities, replicas, num_blocks)
    names, known = list(held), sum(len(each.conversations) for each in held.values())
    known_blocks = router.view.index.num_blocks
    gc.collect()
    gc.freeze()
    draw = random.Random(_SEED)
    times_us, remember_us, event_us = [], [], []
    in_flight: list[Route] = []
    for turn in range(decisions):
        is_continued = draw.random() < _CONTINUED_SHARE
        conversation = draw.choice(held[draw.choice(names)].conversations) if is_continued else known + turn
        tokens = conversations.prompt(conversation, 1)
        start_s = time.thread_time()
        route = router.route(_NAMESPACE, tokens)
        times_us.append((time.thread_time() - start_s) * 1e6)
        in_flight.append(route)
        start_s = time.thread_time()
        router.remember()
        remember_us.append((time.thread_time() - start_s) * 1e6)
        hashes = PromptBlocks(_NAMESPACE, tokens, block_size, identities).all()[_SYSTEM_TOKENS // block_size :]
        batch = _batch_of(router, route.name, held[route.name], conversation, hashes)
        start_s = time.thread_time()
        router.read(route.name, batch)
        event_us.append((time.thread_time() - start_s) * 1e6)
        if len(in_flight) > _NUM_IN_FLIGHT:
            router.finished(in_flight.pop(0), _NEW_TOKENS)
    p50_us, p99_us = np.percentile(times_us, (50, 99))
    remember_p50_us, remember_p99_us = np.percentile(remember_us, (50, 99))
    mean_event_us = sum(event_us) / len(event_us)
    return DecisionTimes(
        replicas,
        known_blocks,
        router.view.index.num_blocks,
        router.view.index.num_refused,
        block_size,
        prompt_tokens + _NEW_TOKENS,
        decisions,
        float(p50_us),
        float(p99_us),
        max(times_us),
        float(remember_p50_us),
        float(remember_p99_us),
        mean_event_us,
    )


def _fill(
    router: Router, conversations: ConversationPrompts, identities: Identities, replicas: int, num_blocks: int
) -> dict[str, ReplicaBlocks]:
    """Send a snapshot of conversations for each replica, numbered from 0. Returns the blocks of each replica."""
    conversation, block_size, held = 0, router.view.block_size, {}
    for index in range(replicas):
        name = f"replica-{index}"
        hashes: list[int] = []
        held[name] = ReplicaBlocks()
        router.join(name)
        while len(hashes) < num_blocks // replicas:
            tokens = conversations.prompt(conversation)
            blocks = PromptBlocks(_NAMESPACE, tokens, block_size, identities).all()
            hashes += blocks
            held[name].hold(conversation, blocks[_SYSTEM_TOKENS // block_size :])
            conversation += 1
        for batch in _snapshot(hashes, block_size):
            assert router.read(name, batch)
    return held


def _snapshot(hashes: Sequence[int], block_size: int) -> Iterator[EventBatch]:
    count = -(-len(hashes) // _SNAPSHOT_BLOCKS)
    for index in range(count):
        part = hashes[index * _SNAPSHOT_BLOCKS : (index + 1) * _SNAPSHOT_BLOCKS]
        events = (_stored(part, block_size),)
        yield EventBatch(1, 0.0, events if index else (AllCleared(), *events), SnapshotPart(index, count, len(hashes)))


def _batch_of(router: Router, name: str, held: ReplicaBlocks, conversation: int, hashes: Sequence[int]) -> EventBatch:
    """Return the events of a replica after a request: blocks stored, and as many others removed."""
    new = held.hold(conversation, hashes)
    removed = BlocksRemoved(np.array(held.evict(len(new)), "<u8").tobytes(), "")
    return EventBatch(router.view.number_of(name) + 1, 0.0, (removed, _stored(new, router.view.block_size)))


def _stored(hashes: Sequence[int], block_size: int) -> BlocksStored:
    packed = np.array(hashes, "<u8").tobytes()
    return BlocksStored(None, packed, bytes(len(packed) // HASH_BYTES * block_size * 4), block_size, "")
