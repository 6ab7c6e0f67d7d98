"""Token rates of the gateway, with a fake clock."""

from radixkv.api.result import Usage
from radixkv.service.server.gateway.traffic import Traffic


def test_nothing_came_yet():
    traffic = Traffic(lambda: 5.0)
    assert (traffic.tokens_per_s(), traffic.hit_rate) == (0.0, 0.0)


def test_the_rate_is_that_of_the_time_since_it_was_measured():
    now = [10.0]
    traffic = Traffic(lambda: now[0])
    traffic.add_generated(30)
    now[0] = 12.0
    assert traffic.tokens_per_s() == 15.0
    now[0] = 12.5
    traffic.add_generated(5)
    assert traffic.tokens_per_s() == 15.0, "half a second is too short to measure"
    now[0] = 13.0
    assert traffic.tokens_per_s() == 5.0
    now[0] = 20.0
    assert traffic.tokens_per_s() == 0.0


def test_the_hit_rate_is_by_tokens():
    traffic = Traffic()
    traffic.add_prompt(Usage(100, 90, 10, 10))
    traffic.add_prompt(Usage(100, 0, 100, 100))
    assert traffic.hit_rate == 0.45
