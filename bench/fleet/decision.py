"""Times routing decisions in a fleet that has many cached blocks, in CPU time of the thread that decides."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from radixkv.api.events import AllCleared, BlocksRemoved, BlocksStored, EventBatch, SnapshotPart
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
_TOKEN_BYTES = 4  # of a token id in an event
_NUM_IN_FLIGHT = 256  # routed requests that have not finished
_SEED = 0  # of tokens and order
_CONTINUED_SHARE = 0.7  # share of the requests that continue a cached conversation
_SNAPSHOT_PART_BLOCKS = 512


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
        """Return the tokens of a conversation with this many further turns, as bytes."""
        draw = np.random.default_rng((self._seed, conversation))
        own = draw.integers(2**32, size=self._own_tokens + num_turns * _NEW_TOKENS, dtype=np.uint32)
        return np.concatenate((self._system, own)).tobytes()


class ReplicaBlocks:
    """The simulated cache of a replica: hashes of the blocks of conversations.

    The common system prompt, which is never evicted, is left out. Blocks are evicted as in a cache: the least recently
    used conversation first, from its end.
    """

    def __init__(self) -> None:
        self._hashes: dict[int, list[int]] = {}  # by conversation; the least recently used conversation comes first

    @property
    def conversations(self) -> list[int]:
        """The conversations with at least one cached block."""
        return list(self._hashes)

    def hold(self, conversation: int, hashes: Sequence[int]) -> list[int]:
        """Use a conversation. Afterwards all its blocks are cached.

        Args:
            conversation: its number.
            hashes: the hashes of its blocks; those that are cached already come first.

        Returns:
            The hashes of the new blocks.
        """
        cached = self._hashes.pop(conversation, [])
        self._hashes[conversation] = list(hashes)
        return list(hashes[len(cached) :])

    def evict(self, num_blocks: int) -> list[int]:
        """Evict up to this many blocks, but none of the most recently used conversation. Returns their hashes."""
        evicted: list[int] = []
        while len(evicted) < num_blocks and len(self._hashes) > 1:
            conversation, hashes = next(iter(self._hashes.items()))
            num_kept = max(0, len(hashes) - (num_blocks - len(evicted)))
            evicted += reversed(hashes[num_kept:])
            del hashes[num_kept:]
            if not hashes:
                del self._hashes[conversation]
        return evicted


def time_decisions(
    *, replicas: int, num_blocks: int, block_size: int, prompt_tokens: int, decisions: int
) -> DecisionTimes:
    """Fill a router's view with snapshots, then time decisions while events continue.

    Seven of ten requests continue a conversation of which a replica has cached the earlier turns, apart from evicted
    blocks; the other requests share only the system prompt. After each decision, the events of one request are read:
    the blocks that its replica stored, and as many that it removed.

    Args:
        replicas: number of replicas.
        num_blocks: number of blocks in the snapshots of all replicas together, about equally many for each replica.
        block_size: tokens per block.
        prompt_tokens: length of a prompt before its last turn.
        decisions: number of decisions.
    """
    conversations, identities = ConversationPrompts(prompt_tokens, _SEED), Identities("")
    router = Router(FleetView(block_size), FleetLoad(), PrefixDemand(), make_routing("prefix"), identities=identities)
    blocks_of_replica = _fill(router, conversations, identities, replicas, num_blocks)
    names = list(blocks_of_replica)
    num_conversations = sum(len(blocks.conversations) for blocks in blocks_of_replica.values())
    known_blocks = router.view.index.num_blocks
    gc.collect()
    gc.freeze()  # so that later collections, which would count as time of decisions, do not scan the view
    draw = random.Random(_SEED)
    route_us, remember_us, event_us = [], [], []
    in_flight: list[Route] = []
    for decision in range(decisions):
        if draw.random() < _CONTINUED_SHARE:
            conversation = draw.choice(blocks_of_replica[draw.choice(names)].conversations)
        else:
            conversation = num_conversations + decision
        tokens = conversations.prompt(conversation, 1)

        start_s = time.thread_time()
        route = router.route(_NAMESPACE, tokens)
        route_us.append((time.thread_time() - start_s) * 1e6)
        in_flight.append(route)

        start_s = time.thread_time()
        router.remember()
        remember_us.append((time.thread_time() - start_s) * 1e6)

        hashes = PromptBlocks(_NAMESPACE, tokens, block_size, identities).all()[_SYSTEM_TOKENS // block_size :]
        batch = _events_of_request(router, route.name, blocks_of_replica[route.name], conversation, hashes)
        start_s = time.thread_time()
        router.read(route.name, batch)
        event_us.append((time.thread_time() - start_s) * 1e6)

        if len(in_flight) > _NUM_IN_FLIGHT:
            router.finished(in_flight.pop(0), _NEW_TOKENS)

    p50_us, p99_us = np.percentile(route_us, (50, 99))
    remember_p50_us, remember_p99_us = np.percentile(remember_us, (50, 99))
    return DecisionTimes(
        replicas=replicas,
        known_blocks=known_blocks,
        end_blocks=router.view.index.num_blocks,
        refused_blocks=router.view.index.num_refused,
        block_size=block_size,
        prompt_tokens=prompt_tokens + _NEW_TOKENS,
        decisions=decisions,
        p50_us=float(p50_us),
        p99_us=float(p99_us),
        max_us=max(route_us),
        remember_p50_us=float(remember_p50_us),
        remember_p99_us=float(remember_p99_us),
        event_us=sum(event_us) / len(event_us),
    )


def _fill(
    router: Router, conversations: ConversationPrompts, identities: Identities, replicas: int, num_blocks: int
) -> dict[str, ReplicaBlocks]:
    """Let the router read a snapshot of each replica. Returns the blocks of each replica.

    Conversations are numbered from 0. Each is cached on one replica.
    """
    conversation, block_size, blocks_of_replica = 0, router.view.block_size, {}
    for index in range(replicas):
        name = f"replica-{index}"
        hashes: list[int] = []
        blocks_of_replica[name] = ReplicaBlocks()
        router.join(name)
        while len(hashes) < num_blocks // replicas:
            tokens = conversations.prompt(conversation)
            blocks = PromptBlocks(_NAMESPACE, tokens, block_size, identities).all()
            hashes += blocks
            blocks_of_replica[name].hold(conversation, blocks[_SYSTEM_TOKENS // block_size :])
            conversation += 1
        for batch in _snapshot_parts(hashes, block_size):
            assert router.read(name, batch)
    return blocks_of_replica


def _snapshot_parts(hashes: Sequence[int], block_size: int) -> Iterator[EventBatch]:
    num_parts = -(-len(hashes) // _SNAPSHOT_PART_BLOCKS)
    for index in range(num_parts):
        part = hashes[index * _SNAPSHOT_PART_BLOCKS : (index + 1) * _SNAPSHOT_PART_BLOCKS]
        stored = _stored_event(part, block_size)
        position = SnapshotPart(index, num_parts, len(hashes))
        yield EventBatch(1, 0.0, (stored,) if index else (AllCleared(), stored), position)


def _events_of_request(
    router: Router, name: str, blocks: ReplicaBlocks, conversation: int, hashes: Sequence[int]
) -> EventBatch:
    """Store the blocks of a conversation on a replica, and evict as many others. Returns the events of the replica."""
    new_hashes = blocks.hold(conversation, hashes)
    removed = BlocksRemoved(np.array(blocks.evict(len(new_hashes)), "<u8").tobytes(), "")
    stored = _stored_event(new_hashes, router.view.block_size)
    return EventBatch(router.view.number_of(name) + 1, 0.0, (removed, stored))


def _stored_event(hashes: Sequence[int], block_size: int) -> BlocksStored:
    """Return the event of stored blocks. All its token ids are 0; only their number is realistic."""
    packed_hashes = np.array(hashes, "<u8").tobytes()
    tokens = bytes(len(hashes) * block_size * _TOKEN_BYTES)
    return BlocksStored(None, packed_hashes, tokens, block_size, "")
