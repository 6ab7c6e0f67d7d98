"""Runs vLLM on the CPU with the KV connector of radixkv, in a process per task, for `bench.vllm_tier`.

It reads tasks from standard input, one JSON object per line, and forks a process for each, so that vLLM is imported
only once. Each process prints JSON lines to the file descriptor that `--answers` names: its process id, the answer to
each prompt, and counts of the tier. It can be killed at any time.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixkv.offload.tiers.block_store import Loan

# Set before vLLM is imported, so that vLLM runs in this process alone, and starts no threads before the forks.
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
)

_VOCAB_SIZE = 512
_FIRST_TOKEN_ID = 3  # after the special ones
_DOCUMENT_TOKENS = 256
_QUESTIONS_PER_DOCUMENT = 10
_QUESTION_TOKENS = (40, 200)
_MAX_TOKENS = 2048
_LONG_PROMPT_TOKENS = 1500


def prompt_of(number: int) -> list[int]:
    """Return a prompt: a document that ten prompts share, and a question of its own.

    Prompts with negative numbers share nothing, and are longer.
    """
    question_rng = random.Random(number)
    if number < 0:
        return [question_rng.randrange(_FIRST_TOKEN_ID, _VOCAB_SIZE) for _ in range(_LONG_PROMPT_TOKENS)]
    document_rng = random.Random(f"document {number // _QUESTIONS_PER_DOCUMENT}")
    tokens = [document_rng.randrange(_FIRST_TOKEN_ID, _VOCAB_SIZE) for _ in range(_DOCUMENT_TOKENS)]
    return tokens + [
        question_rng.randrange(_FIRST_TOKEN_ID, _VOCAB_SIZE) for _ in range(question_rng.randint(*_QUESTION_TOKENS))
    ]


def save_checkpoint(path: str) -> None:
    """Save a random Llama of four layers, whose output depends on every token."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=_MAX_TOKENS,
        tie_word_embeddings=False,
        initializer_range=0.06,
    )
    LlamaForCausalLM(config).save_pretrained(path)


def lose_reads(fraction: float) -> None:
    """Make this fraction of the disk's reads find nothing; if it is 1, all reads raise an error instead."""
    from radixkv.errors import StoreUnavailable
    from radixkv.offload.tiers.disk import DiskStore

    original_get, rng = DiskStore.get, random.Random(0)

    def get(store: DiskStore, keys: Sequence[bytes]) -> list[Loan | None]:
        if fraction == 1:
            raise StoreUnavailable("disk: expected an answer, got none")
        return [None if rng.random() < fraction else loan for loan in original_get(store, keys)]

    DiskStore.get = get  # type: ignore[assignment, method-assign]


def run(task: dict[str, Any], answers: int) -> None:
    """Answer the prompts of a task, one at a time, or all at once if `is_batch`.

    Args:
        task: `model`, a directory; `tier`, options of the connector, or None for vLLM alone; `prompts`, numbers of
            prompts; `changed`, the position of a token to change in each prompt, or None; `times`, how often each
            prompt is answered, by default once, if not `is_batch`; `num_blocks`, blocks of vLLM, or None; `lost`, the
            fraction of the disk's reads that find nothing, or 1 for a disk that fails; `is_endless`, whether to
            continue with further prompts until the process is killed; `first_endless`, n if the first of these prompts
            has the number -n.
        answers: file descriptor for the JSON lines.
    """
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    if task.get("lost"):
        lose_reads(task["lost"])
    transfer_config = None
    if task["tier"] is not None:
        transfer_config = KVTransferConfig(
            kv_connector="RadixKVConnector",
            kv_connector_module_path="radixkv.integrations.tiers.vllm_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=task["tier"],
        )
    llm = LLM(
        task["model"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=_MAX_TOKENS,
        block_size=32,
        enable_prefix_caching=True,
        kv_transfer_config=transfer_config,
        num_gpu_blocks_override=task.get("num_blocks"),
    )
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=1, detokenize=False, ignore_eos=True)

    def send(value: dict[str, Any]) -> None:
        os.write(answers, json.dumps(value).encode() + b"\n")

    def answer_prompts(numbers: list[int]) -> None:
        prompts = []
        for number in numbers:
            tokens = prompt_of(number)
            if task.get("changed") is not None:
                tokens[task["changed"]] ^= 1
            prompts.append({"prompt_token_ids": tokens})
        start_s = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        took_s = time.perf_counter() - start_s
        for number, output in zip(numbers, outputs, strict=True):
            answer = output.outputs[0]
            logprobs = [top[token].logprob for top, token in zip(answer.logprobs, answer.token_ids, strict=True)]
            send(
                {
                    "prompt": number,
                    "tokens": list(answer.token_ids),
                    "logprobs": [logprob.hex() for logprob in logprobs],
                    "cached": output.num_cached_tokens,
                    "took_s": took_s,
                }
            )

    send({"ready": True})
    if task.get("is_batch"):
        answer_prompts(task["prompts"])
    else:
        for number in task["prompts"]:
            for _ in range(task.get("times", 1)):
                answer_prompts([number])
    send({"verified": True})
    number = -task.get("first_endless", 1)
    while task.get("is_endless"):
        answer_prompts([number])
        number -= 1
    counts = None
    if transfer_config is not None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        connector = get_kv_transfer_group()
        connector.shutdown()
        counts = connector._worker._store.counts()
    send({"counts": counts})


def main() -> None:
    """Run tasks until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, help="file descriptor for the answers")
    parser.add_argument("--save", help="save the checkpoint into this directory, and end")
    arguments = parser.parse_args()
    if arguments.save:
        save_checkpoint(arguments.save)
        return
    for module in ("vllm.entrypoints.llm", "vllm.v1.engine.llm_engine"):
        importlib.import_module(module)  # here, so that the forked processes have the modules already

    for line in sys.stdin:
        process_id = os.fork()
        if process_id:
            os.waitpid(process_id, 0)
            os.write(arguments.answers, b'{"ended": true}\n')
            continue
        os.write(arguments.answers, json.dumps({"process_id": os.getpid()}).encode() + b"\n")
        try:
            run(json.loads(line), arguments.answers)
        finally:
            sys.stderr.flush()
            os._exit(0)


if __name__ == "__main__":
    main()
