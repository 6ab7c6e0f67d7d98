"""Which tokens and blocks of a request are counted for its tenant, and when."""

from __future__ import annotations

from radixkv.api.statement import Use
from radixkv.namespace import Namespace
from radixkv.statements.quota_shadow import QuotaShadows, ShadowRequest
from tests.core_bench import BLOCK_SIZE, Bench
from tests.fake_runner import tokens


class RecordingShadows(QuotaShadows):
    """Shadows that record the requests that they receive."""

    def __init__(self, ceilings: dict[str, int], block_size: int) -> None:
        self.requests: list[ShadowRequest] = []
        super().__init__(ceilings, block_size)

    def put(self, tenant: str, request: ShadowRequest) -> None:
        self.requests.append(request)
        super().put(tenant, request)


def use_of(bench: Bench, tenant: str) -> Use:
    """Return what a tenant used."""
    assert bench.cache.ledger is not None
    return bench.cache.ledger.use_of(tenant)


def test_a_request_counts_for_its_tenant() -> None:
    bench = Bench(has_ledger=True)
    bench.prefill(range(10), tenant="a")
    bench.prefill(range(10), tenant="a")
    future = bench.generate(range(10), 3, tenant="b")
    bench.run()
    assert future.result(0).usage.generated_tokens == 3
    expected = Use(requests=2, computed_tokens=11, generated_tokens=0, written_tokens=10, device_hit_tokens=9)
    assert use_of(bench, "a") == expected
    assert use_of(bench, "b") == Use(requests=1, computed_tokens=10, generated_tokens=3, written_tokens=10 + 2)


def test_a_generation_that_is_aborted_counts_with_the_tokens_that_were_sent() -> None:
    bench = Bench(has_ledger=True)
    future = bench.generate(range(10), 30, tenant="a")
    while len(future.streamed) < 5:
        bench.core.step()
    future.cancel()
    bench.run()
    use = use_of(bench, "a")
    assert (use.requests, use.computed_tokens) == (1, 10)
    assert use.generated_tokens >= 5


def test_a_prompt_that_is_aborted_counts_as_far_as_it_was_computed() -> None:
    bench = Bench(has_ledger=True, max_step_tokens=4)
    bench.prefill(range(4), tenant="a")
    future = bench.submit(range(20), tenant="a")
    bench.core.step()
    bench.core.step()
    future.cancel()
    bench.run()
    use = use_of(bench, "a")
    assert (use.requests, use.computed_tokens, use.device_hit_tokens) == (1, 4 + 8, 0)
    waiting = bench.submit(range(50, 60), tenant="b")
    waiting.cancel()
    bench.run()
    assert use_of(bench, "b") == Use()


def test_blocks_of_a_running_request_count_as_resident() -> None:
    bench = Bench(has_ledger=True, max_step_tokens=4)
    bench.submit(range(10), tenant="a")
    bench.core.step()
    bench.clock.now_s = 2.0
    bench.run()
    bench.clock.now_s = 3.0
    assert use_of(bench, "a").device_token_s == 3 * 12  # for 3 s, three whole blocks for ten tokens


def test_requests_are_passed_to_the_shadows_of_their_tenant() -> None:
    shadows = RecordingShadows({"a": 8}, BLOCK_SIZE)
    bench = Bench(has_ledger=True, shadows=shadows)
    bench.prefill(range(10), tenant="a")
    bench.prefill(range(10), tenant="b")
    bench.prefill(range(10), tenant="a", read_cache=False, write_cache=False)
    bench.generate(range(10), 4, tenant="a")
    bench.generate(range(10), 4, tenant="a", write_generated=False)
    bench.run()
    cancelled = bench.submit(range(10), tenant="a")
    cancelled.cancel()
    bench.run()
    shadows.close()
    num_tokens = [(len(each.tokens) // 4, each.num_read_tokens, each.num_written_tokens) for each in shadows.requests]
    # Tokens of the prompt and the answer, tokens that may be read, and tokens that may be written.
    assert num_tokens == [(10, 10, 10), (10, 0, 0), (14, 10, 14), (10, 10, 10)]
    seed = Namespace("fake", "a").seed
    assert {each.seed for each in shadows.requests} == {seed}
    assert shadows.requests[0].tokens == tokens(range(10))
