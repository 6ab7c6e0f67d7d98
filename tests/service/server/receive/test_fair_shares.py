import pytest

from radixkv.errors import QueueFull
from radixkv.service.server.auth.identity import Identity, Role
from radixkv.service.server.receive.fair_shares import FairShares, QuotaKey, QuotaKind

tenant = QuotaKey.of_tenant


def test_a_tenant_alone_may_hold_everything():
    held = FairShares(100, "bytes")
    held.take(tenant("a"), 60)
    held.take(tenant("a"), 40)
    with pytest.raises(QueueFull, match="expected at most an equal share of 100 bytes for this tenant, got 101"):
        held.take(tenant("a"), 1)
    assert held.used == 100


def test_a_refusal_does_not_reveal_how_many_others_there_are():
    messages = set()
    for num_others in (1, 3):
        held = FairShares(12, "calls")
        for index in range(num_others):
            held.take(tenant(f"other {index}"), 6 // num_others)
        held.take(tenant("a"), 6)
        with pytest.raises(QueueFull) as caught:
            held.take(tenant("a"), 1)
        messages.add(str(caught.value))
    assert messages == {"service: expected at most an equal share of 12 calls for this tenant, got 7"}


def test_a_tenant_within_its_share_is_not_refused_for_what_others_hold():
    held = FairShares(100, "bytes")
    held.take(tenant("greedy"), 100)
    held.take(tenant("b"), 30)
    held.take(tenant("b"), 20)
    with pytest.raises(QueueFull):
        held.take(tenant("b"), 1)
    with pytest.raises(QueueFull):
        held.take(tenant("greedy"), 1)


def test_at_most_twice_the_bytes_are_held():
    held = FairShares(1000, "bytes")
    num_refused = 0
    for number in range(100):
        for _ in range(1001):
            try:
                held.take(tenant(str(number)), 1)
            except QueueFull:
                num_refused += 1
    assert held.used == 2000
    assert num_refused == 100_100 - 2000


def test_more_than_the_limit_is_taken_only_while_nothing_is_held():
    held = FairShares(10, "bytes")
    held.take(tenant("a"), 100)
    with pytest.raises(QueueFull):
        held.take(tenant("b"), 1)
    assert held.used == 100


def test_released_bytes_can_be_taken_again():
    held = FairShares(100, "bytes")
    held.take(tenant("a"), 100)
    held.release(tenant("a"), 100)
    held.take(tenant("b"), 100)
    assert held.used == 100


def test_a_refusal_takes_nothing():
    held = FairShares(10, "bytes")
    held.take(tenant("a"), 10)
    for _ in range(3):
        with pytest.raises(QueueFull):
            held.take(tenant("a"), 5)
    held.release(tenant("a"), 10)
    assert held.used == 0


def test_keys_of_two_kinds_with_one_name_have_two_shares():
    shares = FairShares(10, "calls")
    shares.take(QuotaKey(QuotaKind.CONNECTION, ""), 10)
    shares.take(tenant(""), 5)
    for key in (QuotaKey(QuotaKind.CONNECTION, ""), tenant("")):
        with pytest.raises(QueueFull, match=f"equal share of 10 calls for this {key.kind.name.lower()}, got"):
            shares.take(key, 1)


def test_all_free_bytes_are_available_to_a_key_or_those_up_to_its_share():
    held = FairShares(100, "bytes")
    assert held.available(tenant("a")) == 100
    held.take(tenant("a"), 70)
    assert (held.available(tenant("a")), held.available(tenant("b"))) == (30, 50)
    held.take(tenant("b"), 45)
    assert (held.available(tenant("a")), held.available(tenant("b")), held.available(tenant("c"))) == (0, 5, 33)
    held.take(tenant("c"), 85)  # the first bytes of a key may exceed its share, up to twice the limit
    assert held.used == 200
    assert [held.available(tenant(name)) for name in "abcd"] == [0, 0, 0, 0]


def test_the_available_bytes_can_be_taken_and_then_none_are_available():
    held = FairShares(97, "bytes")
    keys = [tenant(str(index)) for index in range(7)]
    for key in keys * 3:
        if num_bytes := held.available(key):
            held.take(key, num_bytes)
        assert held.used <= 2 * 97
        assert held.available(key) == 0


CONNECTION = "ipv4:10.0.0.1:40000"


def test_callers_without_a_credential_are_distinguished_by_connection():
    anyone = Identity("anyone", Role.ADMIN, is_anyone=True)
    for caller in (None, anyone):
        assert QuotaKey.of_caller(caller, CONNECTION) == QuotaKey(QuotaKind.CONNECTION, CONNECTION)


def test_a_credential_is_one_caller_on_any_number_of_connections():
    assert QuotaKey.of_caller(Identity("anyone", Role.ROUTER), CONNECTION) == QuotaKey(QuotaKind.CREDENTIAL, "anyone")


def test_equal_names_of_different_kinds_are_different_keys():
    assert len({QuotaKey(kind, "a") for kind in QuotaKind}) == len(QuotaKind)
    assert QuotaKey.of_tenant("a") == QuotaKey(QuotaKind.TENANT, "a")
