import pytest

from radixkv.errors import QueueFull
from radixkv.service.server.intake.held_bytes import HeldBytes


def test_a_tenant_alone_may_hold_everything():
    held = HeldBytes(100)
    held.take("a", 60)
    held.take("a", 40)
    with pytest.raises(QueueFull, match="expected at most 100 bytes of this tenant's requests"):
        held.take("a", 1)
    assert held.num_bytes == 100


def test_a_tenant_within_its_share_is_not_refused_for_what_others_hold():
    held = HeldBytes(100)
    held.take("greedy", 100)
    held.take("b", 30)
    held.take("b", 20)
    with pytest.raises(QueueFull):
        held.take("b", 1)
    with pytest.raises(QueueFull):
        held.take("greedy", 1)


def test_at_most_twice_the_bytes_are_held():
    held = HeldBytes(1000)
    num_refused = 0
    for number in range(100):
        for _ in range(1001):
            try:
                held.take(str(number), 1)
            except QueueFull:
                num_refused += 1
    assert held.num_bytes == 2000
    assert num_refused == 100_100 - 2000


def test_more_than_all_is_taken_only_while_nothing_is_held():
    held = HeldBytes(10)
    held.take("a", 100)
    with pytest.raises(QueueFull):
        held.take("b", 1)
    assert held.num_bytes == 100


def test_bytes_that_were_given_back_can_be_taken_again():
    held = HeldBytes(100)
    held.take("a", 100)
    held.give_back("a", 100)
    held.take("b", 100)
    assert held.num_bytes == 100


def test_a_refusal_takes_nothing():
    held = HeldBytes(10)
    held.take("a", 10)
    for _ in range(3):
        with pytest.raises(QueueFull):
            held.take("a", 5)
    held.give_back("a", 10)
    assert held.num_bytes == 0
