"""Token rates of the gateway, with a fake clock."""

from radixkv.api.result import Usage
from radixkv.service.server.gateway.token_counter import TokenCounter


def test_both_rates_are_0_before_the_first_request():
    counter = TokenCounter(lambda: 5.0)
    assert (counter.tokens_per_s(), counter.hit_rate) == (0.0, 0.0)


def test_the_rate_is_measured_over_at_least_a_second():
    now = [10.0]
    counter = TokenCounter(lambda: now[0])
    counter.add_generated(30)
    now[0] = 12.0
    assert counter.tokens_per_s() == 15.0
    now[0] = 12.5
    counter.add_generated(5)
    assert counter.tokens_per_s() == 15.0, "half a second is too short to measure"
    now[0] = 13.0
    assert counter.tokens_per_s() == 5.0
    now[0] = 20.0
    assert counter.tokens_per_s() == 0.0


def test_the_hit_rate_is_by_tokens():
    counter = TokenCounter()
    counter.add_prompt(Usage(100, 90, 10, 10))
    counter.add_prompt(Usage(100, 0, 100, 100))
    assert counter.hit_rate == 0.45
