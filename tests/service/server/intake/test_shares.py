import pytest

from radixkv.errors import QueueFull
from radixkv.service.server.intake.account import Account, Kind
from radixkv.service.server.intake.shares import Shares

tenant = Account.of_tenant


def test_a_tenant_alone_may_hold_everything():
    held = Shares(100, "bytes")
    held.take(tenant("a"), 60)
    held.take(tenant("a"), 40)
    with pytest.raises(QueueFull, match="expected at most 100 bytes of this tenant, got 101"):
        held.take(tenant("a"), 1)
    assert held.taken == 100


def test_a_tenant_within_its_share_is_not_refused_for_what_others_hold():
    held = Shares(100, "bytes")
    held.take(tenant("greedy"), 100)
    held.take(tenant("b"), 30)
    held.take(tenant("b"), 20)
    with pytest.raises(QueueFull):
        held.take(tenant("b"), 1)
    with pytest.raises(QueueFull):
        held.take(tenant("greedy"), 1)


def test_at_most_twice_the_bytes_are_held():
    held = Shares(1000, "bytes")
    num_refused = 0
    for number in range(100):
        for _ in range(1001):
            try:
                held.take(tenant(str(number)), 1)
            except QueueFull:
                num_refused += 1
    assert held.taken == 2000
    assert num_refused == 100_100 - 2000


def test_more_than_all_is_taken_only_while_nothing_is_held():
    held = Shares(10, "bytes")
    held.take(tenant("a"), 100)
    with pytest.raises(QueueFull):
        held.take(tenant("b"), 1)
    assert held.taken == 100


def test_bytes_that_were_given_back_can_be_taken_again():
    held = Shares(100, "bytes")
    held.take(tenant("a"), 100)
    held.give_back(tenant("a"), 100)
    held.take(tenant("b"), 100)
    assert held.taken == 100


def test_a_refusal_takes_nothing():
    held = Shares(10, "bytes")
    held.take(tenant("a"), 10)
    for _ in range(3):
        with pytest.raises(QueueFull):
            held.take(tenant("a"), 5)
    held.give_back(tenant("a"), 10)
    assert held.taken == 0


def test_accounts_of_two_kinds_with_one_name_have_two_shares():
    shares = Shares(10, "calls")
    shares.take(Account(Kind.CONNECTION, ""), 10)
    shares.take(tenant(""), 5)
    for account in (Account(Kind.CONNECTION, ""), tenant("")):
        with pytest.raises(QueueFull, match=f"expected at most 5 calls of this {account.kind.name.lower()}, got"):
            shares.take(account, 1)


def test_the_room_of_an_account_is_all_that_is_free_and_then_what_its_share_lacks():
    held = Shares(100, "bytes")
    assert held.room(tenant("a")) == 100
    held.take(tenant("a"), 70)
    assert (held.room(tenant("a")), held.room(tenant("b"))) == (30, 50)
    held.take(tenant("b"), 45)
    assert (held.room(tenant("a")), held.room(tenant("b")), held.room(tenant("c"))) == (0, 5, 33)
    held.take(tenant("c"), 85)
    assert held.taken == 200
    assert [held.room(tenant(name)) for name in "abcd"] == [0, 0, 0, 0]


def test_no_more_is_taken_than_there_is_room_for_and_so_much_always():
    held = Shares(97, "bytes")
    accounts = [tenant(str(number)) for number in range(7)]
    for account in accounts * 3:
        if room := held.room(account):
            held.take(account, room)
        assert held.taken <= 2 * 97
        assert held.room(account) == 0
