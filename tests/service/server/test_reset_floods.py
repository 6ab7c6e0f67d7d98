"""Which connections count as reset floods."""

from __future__ import annotations

from radixkv.service.server.reset_floods import MAX_RESETS, ResetFloods


def test_a_connection_that_only_resets_must_be_closed_once() -> None:
    floods = ResetFloods()
    assert [floods.note_reset("a") for _ in range(MAX_RESETS + 2)] == [False] * (MAX_RESETS - 1) + [True, False, False]
    assert floods.is_closed("a")
    assert not floods.is_closed("b")
    assert floods.forget("a")
    assert not floods.is_closed("a")
    assert not floods.note_reset("a")


def test_answered_calls_compensate_for_resets() -> None:
    floods = ResetFloods()
    for _ in range(10 * MAX_RESETS):
        assert not floods.note_reset("a")
        floods.note_answer("a")
    assert not floods._num_resets


def test_a_flood_is_over_when_the_last_connection_is_forgotten() -> None:
    floods = ResetFloods()
    for peer in ("a", "b"):
        for _ in range(MAX_RESETS):
            floods.note_reset(peer)
    assert [floods.forget("b"), floods.forget("a")] == [False, True]


def test_the_number_of_remembered_connections_is_bounded() -> None:
    floods = ResetFloods()
    for index in range(10_000):
        floods.note_reset(f"peer {index}")
    assert len(floods._num_resets) == 4096
