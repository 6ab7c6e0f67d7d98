"""Ways to reuse K and V, each with its own engine."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.modes.traffic import ModeTraffic
from bench.parts.running_engine import running_engine
from radixkv.api.params import PrefillParams
from radixkv.api.result import GeneratedTokens
from radixkv.api.sampling import Sampling
from radixkv.engine.engine import Engine
from radixkv.tokens import TOKEN_BYTES

_DISK_BYTES = 20_000_000_000
_HOST_BYTES = 8_000_000_000
_MOONCAKE_BYTES = 1 << 30
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class ModeAnswer:
    """Outcome of one request.

    Attributes:
        token_ids: the generated tokens.
        ttft_s, total_s: time to the first and to the last token.
        cached_tokens: tokens of the prompt that were reused.
    """

    token_ids: tuple[int, ...]
    ttft_s: float
    total_s: float
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to reuse K and V.

    Attributes:
        name: shown in the table.
        settings: settings of its engine, in addition to those of the traffic.
        ask: generates a completion.
    """

    name: str
    settings: tuple[str, ...]
    ask: Callable[[Engine, bytes, int], ModeAnswer]

    @contextlib.contextmanager
    def running(self, traffic: ModeTraffic, device: str) -> Iterator[Engine]:
        """Run an engine with the pool that the traffic demands; at the end, delete its blocks from shared stores."""
        settings = [f"model.device={device}", f"cache.capacity_tokens={traffic.pool_tokens}", *self.settings]
        with running_engine(settings) as engine:
            try:
                yield engine
            finally:
                engine.purge().result(_TIMEOUT_S)


def all_modes(folder: Path, redis_url: str | None = None, mooncake_master: str | None = None) -> list[Mode]:
    """Return the modes; those after the prefix cache keep evicted blocks, each in a different store.

    Args:
        folder: an empty directory, for the disk tier and for a new secret, so that no block of another run is found.
        redis_url, mooncake_master: addresses of running stores; None to leave them out.
    """
    secret = folder / "secret"
    secret.write_text(secrets.token_hex(), encoding="utf-8")
    modes = [
        Mode("no cache", (), _recompute),
        Mode("K/V within a request", (), _generate_alone),
        Mode("prefix cache", (), _generate),
        Mode("prefix cache, host memory", (f"tiers.host_bytes={_HOST_BYTES}",), _generate),
        Mode(
            "prefix cache, disk",
            (f"tiers.disk_path={folder}", f"tiers.disk_bytes={_DISK_BYTES}"),
            _generate,
        ),
    ]
    shared = {
        "Redis": None if redis_url is None else (f"tiers.redis_url={redis_url}",),
        "Mooncake": None
        if mooncake_master is None
        else (f"tiers.mooncake_master={mooncake_master}", f"tiers.mooncake_bytes={_MOONCAKE_BYTES}"),
    }
    for name, settings in shared.items():
        if settings is not None:
            modes.append(Mode(f"prefix cache, {name}", (*settings, f"tiers.secret_file={secret}"), _generate))
    return modes


def memory_bytes(engine: Engine) -> int:
    """Return the bytes of K and V that an engine keeps on the device, and in the tiers that report their size."""
    stats = engine.stats().result(_TIMEOUT_S)
    blocks = stats.load.blocks
    tiers = () if engine.offload is None else engine.offload.stats()
    return (blocks.total - blocks.free) * stats.block_bytes + sum(each.used_bytes or 0 for each in tiers)


def _recompute(engine: Engine, prompt: bytes, new_tokens: int) -> ModeAnswer:
    """Compute the whole sequence for each token, as a model without `past_key_values` does."""
    start_s = time.perf_counter()
    tokens, token_ids, ttft_s = prompt, [], 0.0
    for _ in range(new_tokens):
        params = PrefillParams(tokens, read_cache=False, write_cache=False)
        token_ids.append(engine.prefill(params).result(_TIMEOUT_S).next_token_id)
        ttft_s = ttft_s or time.perf_counter() - start_s
        tokens += token_ids[-1].to_bytes(TOKEN_BYTES, "little")
    return ModeAnswer(tuple(token_ids), ttft_s, time.perf_counter() - start_s, 0)


def _generate_alone(engine: Engine, prompt: bytes, new_tokens: int) -> ModeAnswer:
    return _run_generation(engine, PrefillParams(prompt, read_cache=False, write_cache=False), new_tokens)


def _generate(engine: Engine, prompt: bytes, new_tokens: int) -> ModeAnswer:
    return _run_generation(engine, PrefillParams(prompt), new_tokens)


def _run_generation(engine: Engine, params: PrefillParams, new_tokens: int) -> ModeAnswer:
    start_s = time.perf_counter()
    times_s: list[float] = []

    def record_time(_: GeneratedTokens) -> None:
        times_s.append(time.perf_counter() - start_s)

    sampling = Sampling(new_tokens, ignore_eos=True)
    result = engine.generate(params, sampling, record_time).result(_TIMEOUT_S)
    total_s = time.perf_counter() - start_s
    return ModeAnswer(result.token_ids, times_s[0] if times_s else total_s, total_s, result.usage.cached_tokens)
