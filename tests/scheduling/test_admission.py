"""The usage of requests that are admitted a second time, after a preemption."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from radixkv.scheduling.admission import Admission, Admitter
from radixkv.scheduling.request import Request
from tests.offload.tiered_bench import TieredBench


def test_a_preempted_request_that_waits_for_a_tier_counts_as_hit_or_miss_when_it_is_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_hit_tokens = num_miss_tokens = 0
    admit = Admitter.admit

    def count_admitted(admitter: Admitter, request: Request, *args: Any, **options: Any) -> Admission:
        nonlocal num_hit_tokens, num_miss_tokens
        admission = admit(admitter, request, *args, **options)
        if admission is Admission.ADMITTED:
            lease = request.open_lease
            num_hit_tokens += lease.cached_tokens
            num_miss_tokens += lease.num_tokens - lease.cached_tokens
        return admission

    monkeypatch.setattr(Admitter, "admit", count_admitted)
    bench = TieredBench(num_blocks=8)
    for first in (0, 100):
        bench.generate(range(first, first + 9), 16)
    bench.run()
    assert bench.offload.tiers["host"].counts().loaded, "a request waited for the tier"
    usage = bench.cache.tenants[""]
    assert (usage.num_hit_tokens, usage.num_miss_tokens) == (num_hit_tokens, num_miss_tokens)


def test_tokens_that_were_loaded_for_an_earlier_admission_are_not_reported_as_loaded() -> None:
    bench = TieredBench(num_blocks=8)
    bench.runner.is_asynchronous = False
    bench.prefill(range(15))
    bench.evict(8)
    future = bench.generate(range(15), 2)
    bench.stores["host"].run()
    bench.runner.fail_next = torch.OutOfMemoryError()  # so that nothing is computed after the load
    bench.core.step()
    (request,) = bench.core._scheduler.running
    assert (request.reuse.loaded_tokens, request.has_computed) == ({"host": 12}, False)

    # When the request is admitted again, its blocks are neither on the device nor in the tier.
    bench.core._preemptor.preempt(request)
    bench.cache.evict(8)
    bench.index.purge(None, None, None)
    bench.run()
    usage = future.result(0).usage
    assert (usage.device_tokens, usage.host_tokens, usage.computed_tokens) == (0, 0, 15)
