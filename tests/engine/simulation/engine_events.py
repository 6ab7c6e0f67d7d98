"""The world of a simulated engine, and the events in it: values that print as the code that makes them."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from radixkv.api.params import DEFAULT_URGENCY
from radixkv.api.retention import Retention
from radixkv.api.sampling import Sampling
from radixkv.cache.tenants import Quota
from radixkv.namespace import Namespace
from tests.constraints import Rising
from tests.engine.simulation.simulated_model import VOCAB_SIZE, continuation, path_of

ANSWER = 0  # the stem of a piece that continues the path before it as the model would
Prompt = tuple[tuple[int, int], ...]  # pieces: (stem, length)


HOW_STEPS_FAIL = ("before", "after", "not finite", "cancelled", "no memory")


class _Value:
    """Prints only the fields that differ from their defaults, so that it can be pasted into a test."""

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        changed_fields = [
            (field.name, getattr(self, field.name)) for field in fields if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed_fields)})"


@dataclass(frozen=True, repr=False)
class World(_Value):
    """The configuration of one simulated engine.

    Attributes:
        max_held_blocks: blocks that held leases may keep; None for no bound.
        max_public_blocks: maximum number of blocks of public prefixes.
        step_s, token_s: virtual seconds that a step takes, and each of its tokens.
        computes_once: nothing is evicted, cancelled or fails, and prompts branch where blocks end. So no token may be
            computed twice, except those in the block that a preempted request had not filled.
    """

    block_size: int = 4
    num_blocks: int = 64
    max_step_tokens: int = 16
    max_running_requests: int = 8
    policy: str = "lru"
    max_retained_blocks: int = 0
    max_held_blocks: int | None = None
    max_public_blocks: int = 0
    held_lease_ttl_s: float = 20.0
    quotas: tuple[tuple[str, Quota], ...] = ()
    weights: tuple[tuple[str, float], ...] = ()
    step_s: float = 1.0
    token_s: float = 0.05
    computes_once: bool = False


@dataclass(frozen=True, repr=False)
class Ask(_Value):
    """A request.

    Attributes:
        key: the number by which other events refer to the request.
        adapter: name of its adapter; empty for the model itself.
        digest, invoked_by: the digest to which the name mapped when the request was sent, and the token that invokes
            the adapter; the simulation fills them in.
        max_new_tokens: of a generation; 0 for a prefill.
        rises: how far apart its rising tokens may be; 0 if they need not rise.
        refuses_after: the number of rising tokens after which the constraint raises; 0 for never.
        penalty: the presence penalty, and the repetition penalty less 1.
        raises_at, cancels_at, finishes_at: the number of streamed tokens at which the callback raises an exception,
            cancels the request, or finishes it; 0 for never.
    """

    at_s: float
    key: int
    prompt: Prompt
    tenant: str = "a"
    salt: str = ""
    urgency: int = DEFAULT_URGENCY
    reads: bool = True
    writes: bool = True
    retention: Retention | None = None
    holds: bool = False
    deadline_s: float | None = None
    max_new_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    penalty: float = 0.0
    min_tokens: int = 0
    rises: int = 0
    refuses_after: int = 0
    raises_at: int = 0
    cancels_at: int = 0
    finishes_at: int = 0
    adapter: str = ""
    digest: str = ""
    invoked_by: int | None = None

    @property
    def namespace(self) -> Namespace:
        return Namespace("simulated", self.tenant, self.digest if self.invoked_by is None else "", self.salt)

    @property
    def tokens(self) -> bytes:
        return tokens_of(self.prompt, self.namespace, self.digest, self.invoked_by)

    @property
    def path(self) -> bytes:
        """The tokens, each with the adapter that computes it; see `path_of`."""
        return _path_of_invocation(self.tokens, self.digest, self.invoked_by)

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            max(1, self.max_new_tokens),
            self.temperature,
            self.top_p,
            self.seed,
            frozenset(self.stop_token_ids),
            repetition_penalty=1 + self.penalty,
            presence_penalty=self.penalty,
            min_tokens=self.min_tokens,
            prompt_logprobs=None if self.reads else 1,
            constraint=Rising(VOCAB_SIZE, self.rises, refuses_after=self.refuses_after or None) if self.rises else None,
        )


@dataclass(frozen=True, repr=False)
class Cancel(_Value):
    """A caller cancels its request, while a step computes or between two steps."""

    at_s: float
    key: int
    during_step: bool = True


@dataclass(frozen=True, repr=False)
class Finish(_Value):
    """The caller of a generation finishes it, while a step computes or between two steps."""

    at_s: float
    key: int
    during_step: bool = True


@dataclass(frozen=True, repr=False)
class Release(_Value):
    """A caller releases its held lease."""

    at_s: float
    key: int


@dataclass(frozen=True, repr=False)
class Retain(_Value):
    at_s: float
    prompt: Prompt
    retention: Retention
    tenant: str = "a"
    salt: str = ""


@dataclass(frozen=True, repr=False)
class Purge(_Value):
    at_s: float
    tenant: str | None = None
    salt: str | None = None


@dataclass(frozen=True, repr=False)
class Load(_Value):
    """A name is mapped to the adapter with this digest."""

    at_s: float
    name: str
    digest: str


@dataclass(frozen=True, repr=False)
class Unload(_Value):
    """The adapter of a name is unloaded."""

    at_s: float
    name: str


@dataclass(frozen=True, repr=False)
class Register(_Value):
    """An operator makes a prefix public."""

    at_s: float
    name: str
    prompt: Prompt
    adapter: str = ""


@dataclass(frozen=True, repr=False)
class Unregister(_Value):
    """An operator unregisters a public prefix."""

    at_s: float
    name: str


@dataclass(frozen=True, repr=False)
class Fail(_Value):
    """A step fails as described at `SimulatedRunner`, or all its requests are `cancelled` while it computes."""

    step: int
    how: str = "before"


@dataclass(frozen=True, repr=False)
class Close(_Value):
    """The engine is closed at a time, or after a number of steps. No event follows."""

    at_s: float = 0.0
    step: int | None = None


Event = Ask | Cancel | Finish | Release | Retain | Purge | Load | Unload | Register | Unregister | Fail | Close


@lru_cache(maxsize=20_000)
def tokens_of(prompt: Prompt, namespace: Namespace, digest: str = "", invoked_by: int | None = None) -> bytes:
    """Return a prompt's tokens. Two stems share none, so the pieces say what prompts share."""
    tokens = b""
    for stem, length in prompt:
        if stem == ANSWER:
            ids = continuation(namespace, _path_of_invocation(tokens, digest, invoked_by), Sampling(length, seed=0))
        else:
            ids = tuple(range(1000 * stem, 1000 * stem + length))
        tokens += np.array(ids, dtype="<u4").tobytes()
    return tokens


def _path_of_invocation(tokens: bytes, digest: str, invoked_by: int | None) -> bytes:
    """Return the path of tokens; see `path_of`. The last token `invoked_by` invokes the adapter."""
    ids = np.frombuffer(tokens, "<u4").tolist()
    if invoked_by is None or invoked_by not in ids:
        return tokens
    return path_of(tokens, digest, len(ids) - 1 - ids[::-1].index(invoked_by))


def length_of(prompt: Prompt) -> int:
    return sum(length for _, length in prompt)


def max_tokens_of(world: World, tenant: str, *, generates: bool) -> int:
    """Return the maximum number of tokens that `Engine` allows for a prompt and its generation together."""
    ceiling = dict(world.quotas).get(tenant, Quota()).ceiling_blocks
    # A generation needs one more block, for a copy of the block in which its prompt ends.
    max_pool_tokens = world.block_size * (world.num_blocks - (1 if generates else 0))
    if ceiling is None:
        return max_pool_tokens
    # The K/V of the last generated token are never computed.
    return min(max_pool_tokens, world.block_size * ceiling + (1 if generates else 0))


def next_turn(world: World, rng: random.Random, ask: Ask, key: int, stem: int) -> Ask:
    """Make a request whose prompt is that of a generation, a part of its output, and some tokens of a stem."""
    prompt = (*ask.prompt, (ANSWER, rng.randint(1, ask.max_new_tokens)), (stem, rng.randint(1, 9)))
    return dataclasses.replace(
        ask,
        at_s=round(ask.at_s + rng.choice((10, 40)) * rng.random(), 2),
        key=key,
        prompt=cut(prompt, max_tokens_of(world, ask.tenant, generates=False)),
        max_new_tokens=0,
    )


def cut(prompt: Prompt, num_tokens: int) -> Prompt:
    """Return the first tokens of a prompt."""
    pieces: list[tuple[int, int]] = []
    for stem, length in prompt:
        if num_tokens > 0:
            pieces.append((stem, min(length, num_tokens)))
        num_tokens -= length
    return tuple(pieces)
