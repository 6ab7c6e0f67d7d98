"""Checks that a prefix cache does not change a model's results."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import numpy as np
import torch

from radixkv.compute.forward import Chunk, ChunkState
from radixkv.compute.runner import Runner
from radixkv.errors import UnsupportedModel
from radixkv.model.attention.attention_function import ATTENTION_NAME
from radixkv.model.attention.interface import AttentionKernels
from radixkv.model.model import Model
from radixkv.model.refusals import SERVE_FAST, reason_of
from radixkv.model.report import Report, report_nothing
from radixkv.startup.attention_check import check_attention
from radixkv.storage.device_pool import KVShape, KVStorage
from radixkv.tokens import TOKEN_BYTES

# Maximum relative distance of logits that are computed in two ways. Another summation order causes about 1e-6 in
# float32 and 1e-2 in bfloat16; a missing window, mask or state causes 1e-1 and more
# (tests/startup/test_model_check.py).
LOGITS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}

# Some models in bfloat16 amplify rounding. With 24 layers of random weights, the logits of transformers' eager and SDPA
# attention are 0.024 apart for a standard deviation of 0.02, and 0.093 apart for 0.05, while a missing window of 128
# causes a distance of 1.2 at the 133rd token. Therefore the distance from eager attention may exceed the tolerance: it
# may be up to this many times the distance between eager and SDPA attention, but at most twice the tolerance.
_MAX_SDPA_DISTANCES = 1.5

# With int8 weights, rows are quantized too: the last bits of the attention output decide to which integer a number of
# the next matmul's input is rounded.
_INT8_TOLERANCE = 5e-2


def check_model(
    model: Model,
    kernels: AttentionKernels,
    block_size: int,
    kv_shape: KVShape | None = None,
    report: Report = report_nothing,
) -> None:
    """Compute a short prompt in parts, and compare its logits with those of transformers' eager attention.

    The first part has no prefix and ends inside a block. The second part is a single token, which depends most on its
    prefix. In exact mode the prompt is also computed in one step: its logits, K and V must be bitwise identical. If the
    pool stores K and V in another dtype than the model's, exact mode compares one step and parts with that dtype too,
    and fast mode only runs `check_attention`. For each dtype, `check_attention` runs first.

    Args:
        model: the model.
        kernels: the kernels that will serve it.
        block_size: tokens per block. The prompt fills two blocks and a part of a third: with 64 tokens per block, it is
            longer than a window of 128.
        kv_shape: the shape and format of K and V in the pool; None for the model's own.
        report: called with a description of each computation.

    Raises:
        UnsupportedModel: the results differ, so the model keeps state that the cache does not hold, or its attention
            differs from that of the kernels; or transformers' own attention fails.
        torch.OutOfMemoryError: the device has too little memory for the prompt.
    """
    num_tokens = 2 * block_size + 5
    tokens = ((np.arange(num_tokens) * 7919 + 1) % model.vocab_size).astype("<u4").tobytes()
    ends = [block_size + 3, block_size + 4, num_tokens]
    report("computing a prompt with transformers' attention")
    expected = dict(zip(ends, _transformers_logits(model, tokens, ends), strict=True))
    for shape in dict.fromkeys((model.kv_shape, kv_shape or model.kv_shape)):
        report("comparing attention with its definition")
        for use in model.attention_uses(shape, block_size):
            check_attention(kernels, use)
        if shape != model.kv_shape and not model.is_exact:
            continue
        # In exact mode, the first half of the pool is for the prompt in one step, and the second half for its parts.
        prompt_blocks = -(-num_tokens // block_size)
        storage = KVStorage(2 * prompt_blocks, block_size, shape, model.device)
        runner = Runner(model, storage, kernels, num_state_slots=1)
        steps = [(start, end, prompt_blocks) for start, end in itertools.pairwise([0, *ends])]
        if model.is_exact:
            steps.insert(0, (0, num_tokens, 0))
        logits = []
        for index, (start, end, first_block) in enumerate(steps, 1):
            report(f"computing a prompt in parts, part {index} of {len(steps)}")
            logits.append(_compute(runner, tokens, start, end, first_block))
            if shape == model.kv_shape:
                _require_close(model, tokens, start, end, logits[-1], expected[end])
        if not model.is_exact:
            continue
        in_one_step, *_, in_parts = logits
        has_equal_kv = all(torch.equal(*pool.blocks.chunk(2)) for pool in storage.pools)
        if not (torch.equal(in_one_step, in_parts) and has_equal_kv):
            raise UnsupportedModel(
                f"{_first_inexact_module(runner, tokens)}: expected bitwise identical results in one step and in "
                f"parts, got different ones; {SERVE_FAST}"
            )


def _compute(
    runner: Runner, tokens: bytes, start: int, end: int, first_block: int, saved_at: int | None = None
) -> torch.Tensor:
    """Compute the part `[start, end)` of a prompt in the blocks from `first_block` on. Returns its last logits.

    If the model has recurrent states, the state after position `saved_at`, by default `end`, is saved, and a part that
    does not start at 0 continues from the saved state.
    """
    block_ids = first_block + np.arange(-(-end // runner.storage.block_size), dtype=np.int32)
    state = None if runner.states is None else ChunkState(0 if start else None, [(saved_at or end, 0)])
    return runner.run([Chunk(tokens, start, end, block_ids, None, wants_logits=True, state=state)]).logits[0]


def _first_inexact_module(runner: Runner, tokens: bytes) -> str:
    """Return the name of the first module whose output for the last token depends on other tokens of the batch.

    If there is none, this is the name of the model's class.
    """
    module = runner.model.module
    last_outputs: dict[str, torch.Tensor] = {}  # the last token's output, in the order in which modules end

    def keep_last_output(name: str) -> Callable[..., None]:
        def hook(_: torch.nn.Module, inputs: object, output: object) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
                last_outputs[name] = tensor.reshape(-1, tensor.shape[-1])[:num_new][-1].clone()

        return hook

    num_tokens = len(tokens) // TOKEN_BYTES
    hooks = [
        submodule.register_forward_hook(keep_last_output(name)) for name, submodule in module.named_modules() if name
    ]
    outputs = []
    try:
        for start in (0, num_tokens - 1):  # the whole prompt, then its last token alone
            num_new = num_tokens - start  # read by the hooks: the rows after these are padding
            _compute(runner, tokens, start, num_tokens, first_block=0, saved_at=None if start else num_tokens - 1)
            outputs.append(dict(last_outputs))
            last_outputs.clear()
    finally:
        for hook in hooks:
            hook.remove()
    with_prompt, alone = outputs
    differing = [name for name in with_prompt if name in alone and not torch.equal(with_prompt[name], alone[name])]
    return differing[0] if differing else type(module).__name__


@torch.inference_mode()
def _transformers_logits(model: Model, tokens: bytes, ends: list[int], attention: str = "eager") -> torch.Tensor:
    """Compute a prompt with transformers' own attention.

    Returns:
        The logits of the last token before each of `ends`, float32 `[len(ends), vocab_size]`.
    """
    input_ids = torch.from_numpy(np.frombuffer(tokens, dtype="<u4").astype(np.int64)).to(model.device)
    rows = torch.tensor(ends, device=model.device) - 1
    try:
        model.module.set_attn_implementation(attention)
        with model.unfused():
            output = model.module(input_ids=input_ids[None], use_cache=False, logits_to_keep=rows)
            logits: torch.Tensor = output.logits[0].float()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the model's code may raise anything
        name = type(model.module).__name__
        raise UnsupportedModel(f"{name}: transformers' {attention} attention fails: {reason_of(error)}") from error
    finally:
        model.module.set_attn_implementation(ATTENTION_NAME)
    return logits


def _require_close(
    model: Model, tokens: bytes, start: int, end: int, got: torch.Tensor, expected: torch.Tensor
) -> None:
    """Refuse a model whose logits of token `end - 1`, over `start` cached tokens, differ from transformers' logits."""
    distance = _distance(got, expected)
    tolerance = _INT8_TOLERANCE if model.weights == "int8" else LOGITS_TOLERANCE[model.kv_shape.dtype]
    if tolerance < distance <= 2 * tolerance and model.kv_shape.dtype == torch.bfloat16:
        with contextlib.suppress(UnsupportedModel):  # the model only supports eager attention
            sdpa_distance = _distance(_transformers_logits(model, tokens, [end], "sdpa")[0], expected)
            tolerance = max(tolerance, min(2 * tolerance, _MAX_SDPA_DISTANCES * sdpa_distance))
    if not distance <= tolerance:
        raise UnsupportedModel(
            f"{type(model.module).__name__}: computed over {start} cached tokens, the logits differ from those "
            f"of transformers' own attention: expected a relative distance of at most {tolerance:.2g}, got "
            f"{distance:.2g}"
        )


def _distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())
