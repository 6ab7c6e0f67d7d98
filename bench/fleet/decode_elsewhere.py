"""Decodes on one server from K/V that another one computed; compares the answers, and times the transfer.

    python -m bench.fleet.decode_elsewhere [--generations 1000] [--json FILE]

Two servers run the embedded model. For each prompt, the first one generates an answer and holds the K/V of the prompt,
and the second one then generates from these K/V. After that, the K/V of one long prompt are fetched several times, in
turn with a bare gRPC stream of as many messages of the same size. The exit status is 1 if answers differ.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from bench.fleet.bare_stream import METHOD
from bench.parts.result_file import write_result
from bench.parts.server_process import ServerProcess, serve_command
from radixkv.service.client import Client, KVSource

_TENANT = "acme"
_MIN_POOL_TOKENS = 4096
_VOCABULARY = 500
_UNLIMITED_MESSAGE_SIZE = (("grpc.max_receive_message_length", -1),)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare answers, then speeds. Returns 1 if answers differ."""
    args = _parser().parse_args(arguments)
    with contextlib.ExitStack() as stack:
        secret_file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "secret"
        secret_file.write_text(secrets.token_hex(), encoding="utf-8")
        pool_setting = f"cache.capacity_tokens={max(2 * args.long_prompt_tokens, _MIN_POOL_TOKENS)}"
        secret_setting = f"tiers.secret_file={secret_file}"
        first_settings = ["transfer.serve=true", "cache.max_held_share=1.0", pool_setting, secret_setting]
        first_address = stack.enter_context(ServerProcess(serve_command("tiny", "cpu", first_settings)))
        second_settings = [f"kv_sources.first.address={first_address}", pool_setting, secret_setting]
        second_address = stack.enter_context(ServerProcess(serve_command("tiny", "cpu", second_settings)))
        bare_address = stack.enter_context(ServerProcess([sys.executable, "-m", "bench.fleet.bare_stream"]))
        first_client = stack.enter_context(Client(first_address))
        second_client = stack.enter_context(Client(second_address))
        answers = _compare(first_client, second_client, first_address, args.generations, args.seed)
        speeds = _measure_speeds(first_client, bare_address, args.long_prompt_tokens, args.rounds)
    ratio = speeds["fetch_kv_mb_per_s"] / speeds["bare_mb_per_s"]
    print(
        f"{answers['generations']} generations, {answers['different']} differ, {answers['fetched_tokens']} tokens of "
        f"{answers['prompt_tokens']} fetched\nFetchKV {speeds['fetch_kv_mb_per_s']:.0f} MB/s, a bare stream "
        f"{speeds['bare_mb_per_s']:.0f} MB/s: {ratio:.2f}"
    )
    write_result(args.json, "bench.fleet.decode_elsewhere", arguments, {**answers, **speeds, "ratio": ratio})
    return int(answers["different"] > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fleet.decode_elsewhere", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--generations", type=int, default=1000, metavar="N")
    parser.add_argument("--long-prompt-tokens", type=int, default=16_384, metavar="N")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="rounds of each stream; default 9")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def _compare(
    first_client: Client, second_client: Client, first_address: str, num_generations: int, seed: int
) -> dict[str, int]:
    """Generate from each prompt on both servers, greedily or with sampling. Returns counts of answers and tokens."""
    draw = random.Random(seed)
    num_different = num_fetched_tokens = num_prompt_tokens = 0
    for _ in range(num_generations):
        prompt = draw.choices(range(_VOCABULARY), k=draw.randint(1, 600))
        options: dict[str, Any] = {
            "tenant": _TENANT,
            "max_new_tokens": draw.randint(1, 16),
            "temperature": draw.choice([0.0, 1.0]),
            "seed": draw.getrandbits(32),
        }
        expected = _generate(first_client, prompt, options)[0]
        prefilled = first_client.prefill(prompt, tenant=_TENANT, hold_lease=True)
        source = KVSource(address=first_address, lease_id=prefilled.lease_id, epoch=prefilled.epoch)
        answer, fetched_tokens = _generate(second_client, prompt, {**options, "kv_source": source})
        first_client.release(prefilled.lease_id, tenant=_TENANT)
        num_different += answer != expected
        num_fetched_tokens += fetched_tokens
        num_prompt_tokens += len(prompt)
    return {
        "generations": num_generations,
        "different": num_different,
        "fetched_tokens": num_fetched_tokens,
        "prompt_tokens": num_prompt_tokens,
    }


def _generate(client: Client, prompt: list[int], options: dict[str, Any]) -> tuple[list[int], int]:
    """Return the generated tokens, and the number of prompt tokens whose K/V were fetched."""
    chunks = list(client.generate(prompt, **options))
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    return token_ids, chunks[-1].usage.remote_tokens


def _measure_speeds(client: Client, bare_address: str, num_tokens: int, num_rounds: int) -> dict[str, float]:
    """Fetch the K/V of one prompt and read a bare stream, in turn. Returns the bytes, and the median MB/s of each."""
    prompt = random.Random(1).choices(range(_VOCABULARY), k=num_tokens)
    prefilled = client.prefill(prompt, tenant=_TENANT, hold_lease=True)
    message_sizes = [len(each.data) for each in client.fetch_kv(prefilled.lease_id, tenant=_TENANT) if each.data]
    times_s: dict[str, list[float]] = {"fetch_kv": [], "bare": []}
    with grpc.insecure_channel(bare_address, options=_UNLIMITED_MESSAGE_SIZE) as channel:
        stream = channel.unary_stream(METHOD, bytes, bytes)
        for _ in range(num_rounds):
            start_s = time.perf_counter()
            num_bytes = sum(len(each.data) for each in client.fetch_kv(prefilled.lease_id, tenant=_TENANT))
            times_s["fetch_kv"].append(time.perf_counter() - start_s)
            start_s = time.perf_counter()
            num_bare_bytes = sum(len(each) for each in stream(f"{len(message_sizes)} {message_sizes[0]}".encode()))
            times_s["bare"].append(time.perf_counter() - start_s)
            client.renew(prefilled.lease_id, tenant=_TENANT)
    assert num_bytes == num_bare_bytes, "the blocks of a prompt have one size"
    return {
        "bytes": num_bytes,
        **{f"{name}_mb_per_s": num_bytes / statistics.median(each) / 1e6 for name, each in times_s.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
