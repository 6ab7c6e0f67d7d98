"""Steps of several adapters and the base model, against peft's own forward pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from radixkv.errors import UnknownAdapter
from tests.model.adapters.adapted import Adapted, prompt, serve, tables
from tests.model.exact.exact_cases import MODELS

# Relative to the largest logit. On a Zen 4, logits of gpt_oss differ by 1.8e-5, with and without kernels in C++.
MAX_DIFFERENCE = 3e-5


@pytest.fixture(scope="module", params=list(MODELS))
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return serve(request.param, tmp_path_factory.mktemp(request.param))


def assert_agree(got: torch.Tensor, expected: torch.Tensor) -> None:
    largest = expected.abs().max()
    assert (got - expected).abs().max() <= MAX_DIFFERENCE * largest
    assert expected.std() > 1000 * MAX_DIFFERENCE * largest, "the oracle's logits are too flat to tell right from wrong"


@pytest.mark.sampled(one_in=3)
def test_merged_steps_agree_with_peft(adapted: Adapted) -> None:
    """Each step computes chunks of prompts with the base model and with three adapters."""
    prompts = [prompt(length, seed=length) for length in (37, 60, 21, 50)]  # by the number of the adapter
    blocks = tables(4)
    expected = [adapted.expected(number, tokens) for number, tokens in enumerate(prompts)]
    assert all((expected[0][-1] - each[-1]).abs().max() > 0.1 for each in expected[1:]), "adapters change the logits"
    starts = [0, 0, 0, 0]
    for ends in ([10, 30, 5, 17], [11, 31, 20, 18], [12, 60, 21, 19], [37, 60, 21, 50]):
        numbers = [number for number in (2, 0, 3, 1) if ends[number] > starts[number]]
        chunks = [adapted.chunk(n, prompts[n], starts[n], ends[n], blocks[n]) for n in numbers]
        logits = adapted.runner.run(chunks).logits.split([each.num_tokens for each in chunks])
        for number, rows in zip(numbers, logits, strict=True):
            assert_agree(rows, expected[number][starts[number] : ends[number]])
        starts = ends


def test_non_adjacent_requests_of_one_adapter_agree_with_peft(adapted: Adapted) -> None:
    prompts = [prompt(length, seed=length) for length in (9, 13, 2, 7, 5)]
    numbers = [1, 0, 1, 1, 3]
    chunks = [
        adapted.chunk(number, tokens, 0, len(tokens), table)
        for number, tokens, table in zip(numbers, prompts, tables(5), strict=True)
    ]
    logits = adapted.runner.run(chunks).logits.split([len(tokens) for tokens in prompts])
    for number, tokens, rows in zip(numbers, prompts, logits, strict=True):
        assert_agree(rows, adapted.expected(number, tokens))


def test_base_rows_do_not_depend_on_adapters_in_the_batch(adapted: Adapted) -> None:
    tokens, blocks = prompt(40), tables(2)
    alone = adapted.runner.run([adapted.chunk(0, tokens, 0, 40, blocks[0])]).logits
    together = adapted.runner.run(
        [adapted.chunk(1, prompt(25, 1), 0, 25, blocks[1]), adapted.chunk(0, tokens, 0, 40, blocks[0])]
    ).logits[25:]
    assert torch.equal(alone, together)


def test_an_adapter_that_is_not_loaded_fails_only_its_step(adapted: Adapted) -> None:
    tokens, (table,) = prompt(5), tables(1)
    chunk = adapted.chunk(1, tokens, 0, 5, table)
    adapted.model.adapted.adapters.remove(chunk.adapter)
    try:
        with pytest.raises(UnknownAdapter, match="expected one that is loaded"):
            adapted.runner.run([chunk])
    finally:
        adapted.model.adapted.adapters.add(adapted.files[0])
    assert_agree(adapted.runner.run([chunk]).logits, adapted.expected(1, tokens))


def test_a_model_without_adapters_refuses_them(tmp_path: Path) -> None:
    served = serve("llama", tmp_path, [{}])
    served.model.adapted = None
    with pytest.raises(UnknownAdapter, match=r"expected none, since model\.max_adapters is 0"):
        served.runner.run([served.chunk(1, prompt(5), 0, 5, tables(1)[0])])


def test_an_adapter_of_a_float32_router_in_a_half_precision_model_equals_changed_weights(tmp_path: Path) -> None:
    served = serve("hunyuan_v1_moe", tmp_path, [{"target_modules": ["wg"]}], dtype="bfloat16")
    tokens, (table,) = prompt(40), tables(1)
    base = served.runner.run([served.chunk(0, tokens, 0, 40, table)]).logits
    adapted = served.runner.run([served.chunk(1, tokens, 0, 40, table)]).logits
    routers = dict(served.model.module.named_modules())
    for name, each in served.files[0].layers.items():
        assert each.down.dtype == each.up.dtype == routers[name].weight.dtype == torch.float32
        routers[name].weight.data += each.up @ each.down
    changed = served.runner.run([served.chunk(0, tokens, 0, 40, table)]).logits
    largest = changed.abs().max()
    assert (adapted - changed).abs().max() < 0.02 * largest
    assert (adapted - base).abs().max() > 0.1 * largest


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_activated_adapter_agrees_with_peft(family: str, tmp_path: Path) -> None:
    """Rows before the last invocation use the base model, and later rows the adapter; without one, all use the base."""
    served = serve(family, tmp_path, [{"alora_invocation_tokens": [7, 8]}])
    tokens = prompt(50)
    tokens[[10, 11, 30, 31]] = 7, 8, 7, 8
    start = served.files[0].applies_from(tokens.tobytes())
    assert start == 30
    blocks = tables(2)
    for first, last in ((0, 20), (20, 33), (33, 49), (49, 50)):
        chunk = served.chunk(1, tokens, first, last, blocks[0], adapter_from=start)
        assert_agree(served.runner.run([chunk]).logits, served.expected(1, tokens)[first:last])
    base = served.expected(0, tokens)
    assert_agree(served.expected(1, tokens)[:start], base[:start])
    assert (served.expected(1, tokens)[-1] - base[-1]).abs().max() > 0.1
    without_invocation = np.delete(tokens, [11, 31])
    assert served.files[0].applies_from(without_invocation.tobytes()) is None
    assert_agree(served.expected(1, without_invocation), served.expected(0, without_invocation))
