from radixkv.cache.elsewhere import retentions
from radixkv.cache.elsewhere.retentions import Retentions, Wish
from radixkv.namespace import Namespace

ACME, OTHER, THIRD = (Namespace("m", tenant) for tenant in ("acme", "other", "third"))


def test_a_block_of_which_nothing_is_known_has_the_default() -> None:
    assert Retentions().of(b"a") == 50


def test_a_priority_is_raised_and_not_lowered_unless_it_is_set() -> None:
    known = Retentions()
    known.raise_to(b"a", ACME, Wish(80, None))
    known.raise_to(b"a", ACME, Wish(60, None))
    assert known.of(b"a") == 80
    known.set(b"a", ACME, Wish(60, None))
    assert known.of(b"a") == 60
    known.set(b"a", ACME, Wish(50, None))
    assert (known.of(b"a"), len(known)) == (50, 0)


def test_a_lower_priority_than_the_default_is_noted_too() -> None:
    known = Retentions()
    known.raise_to(b"a", ACME, Wish(20, None))
    assert known.of(b"a") == 20


def test_priorities_end_at_their_time_a_bounded_number_at_once(monkeypatch) -> None:
    monkeypatch.setattr(retentions, "_MAX_ENDED_AT_ONCE", 2)
    known = Retentions()
    for index, key in enumerate((b"a", b"b", b"c")):
        known.set(key, ACME, Wish(80, 10.0 + index))
    known.set(b"d", ACME, Wish(80, None))
    assert known.expire(9.9) == []
    assert known.expire(12.0) == [b"a", b"b"]
    assert known.expire(12.0) == [b"c"]
    assert known.expire(1e9) == []
    assert (known.of(b"a"), known.of(b"d")) == (50, 80)


def test_a_later_wish_replaces_the_end_of_an_earlier_one() -> None:
    known = Retentions()
    known.set(b"a", ACME, Wish(80, 10.0))
    known.raise_to(b"a", ACME, Wish(80, 20.0))
    assert known.expire(15.0) == []
    assert known.expire(20.0) == [b"a"]


def test_the_same_priority_for_less_time_leaves_the_later_end() -> None:
    known = Retentions()
    for key, ends_s in ((b"a", (20.0, 10.0)), (b"b", (None, 10.0)), (b"c", (10.0, None))):
        for end_s in ends_s:
            known.raise_to(key, ACME, Wish(80, end_s))
    assert [known.wish_of(key) for key in (b"a", b"b", b"c")] == [Wish(80, 20.0), Wish(80, None), Wish(80, None)]
    known.raise_to(b"a", ACME, Wish(90, 5.0))
    assert known.wish_of(b"a") == Wish(90, 5.0)


def test_beyond_the_bound_that_of_which_was_heard_longest_ago_is_forgotten() -> None:
    known = Retentions(max_keys=2)
    forgotten = [known.set(key, ACME, Wish(80, 10.0)) for key in (b"a", b"b", b"a", b"c")]
    assert forgotten == [None, None, None, b"b"]
    assert [known.of(key) for key in (b"a", b"b", b"c")] == [80, 50, 80]
    assert known.expire(10.0) == [b"a", b"c"]


def test_a_purge_forgets_a_tenant() -> None:
    known = Retentions()
    known.set(b"a", ACME, Wish(80, 10.0))
    known.set(b"b", OTHER, Wish(80, 10.0))
    known.purge("acme", None, None)
    assert (known.of(b"a"), known.of(b"b")) == (50, 80)
    assert known.expire(10.0) == [b"b"]


def test_a_tenant_with_its_equal_part_makes_others_forget_nothing() -> None:
    known = Retentions(max_keys=4)
    for key in (b"a", b"b"):
        known.set(key, ACME, Wish(80, None))
    forgotten = [known.set(key, OTHER, Wish(80, None)) for key in (b"p", b"q", b"r", b"s")]
    assert forgotten == [None, None, b"p", b"q"]
    assert (known.of(b"a"), known.of(b"b")) == (80, 80)


def test_a_tenant_that_had_all_makes_room_for_another() -> None:
    known = Retentions(max_keys=4)
    for key in (b"p", b"q", b"r", b"s"):
        known.set(key, OTHER, Wish(80, None))
    forgotten = [known.set(key, ACME, Wish(80, None)) for key in (b"a", b"b", b"c")]
    assert forgotten == [b"p", b"q", b"a"]
    known.purge("other", None, None)
    assert [known.set(key, ACME, Wish(80, None)) for key in (b"a", b"d", b"e")] == [None, None, b"b"]


def test_of_three_tenants_the_one_that_has_most_makes_room_for_another() -> None:
    known = Retentions(max_keys=8)
    for key in (b"p", b"q"):
        known.set(key, OTHER, Wish(80, None))
    for key in (b"a", b"b", b"c", b"d", b"e", b"f"):
        known.set(key, ACME, Wish(80, None))
    forgotten = [known.set(key, THIRD, Wish(80, None)) for key in (b"x", b"y", b"z", b"w")]
    assert forgotten == [b"a", b"b", b"c", b"x"]
    assert [known.of(key) for key in (b"p", b"q", b"y", b"f")] == [80, 80, 80, 80]


def test_a_tenant_that_has_fewer_keys_now_makes_no_room() -> None:
    known = Retentions(max_keys=5)
    for key in (b"a", b"b", b"c"):
        known.set(key, ACME, Wish(80, 10.0))
    for key in (b"p", b"q"):
        known.set(key, OTHER, Wish(80, None))
    known.forget(b"a")
    known.set(b"b", ACME, Wish(50, None))
    known.set(b"x", THIRD, Wish(80, None))
    known.set(b"y", THIRD, Wish(80, None))
    assert known.set(b"r", OTHER, Wish(80, None)) == b"p"
    assert known.set(b"d", ACME, Wish(80, None)) == b"x"
