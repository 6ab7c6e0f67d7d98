from __future__ import annotations

from radixkv.cache.policies.order_trial import Order, OrderTrial


def test_an_order_in_force_gives_way_to_a_clearly_better_one_only() -> None:
    trial = OrderTrial(100)
    trial.filled(400)
    trial._wins[Order.REUSED_LAST][Order.LIFETIMES] = 60.0
    trial._wins[Order.LIFETIMES][Order.REUSED_LAST] = 40.0  # a lead of 20: two deviations of a coin
    assert not trial.filled(10)
    assert trial.order == Order.LIFETIMES
    trial._wins[Order.REUSED_LAST][Order.LIFETIMES] += 10
    assert not trial.filled(9)  # a tenth of the cache is not yet new
    assert trial.filled(1)
    assert trial.order == Order.REUSED_LAST


def test_lifetimes_are_given_time_to_be_learned() -> None:
    trial = OrderTrial(100)
    trial.filled(380)
    trial._wins[Order.LAST_USE][Order.LIFETIMES] = 1000.0
    assert not trial.filled(10)
    assert trial.order == Order.LIFETIMES
    assert trial.filled(20)
    assert trial.order == Order.LAST_USE
