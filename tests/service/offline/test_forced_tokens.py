from __future__ import annotations

import numpy as np

from radixkv.service.offline.forced_tokens import ForcedTokens


def test_exactly_one_completion_is_allowed() -> None:
    constraint = ForcedTokens([3, 0, 3], vocab_size=5)
    first, second = constraint.start(frozenset()), constraint.start(frozenset({3}))
    for token_id in (3, 0, 3):
        assert not first.is_finished
        assert np.flatnonzero(first.allowed()).tolist() == [token_id]
        assert first.allowed().shape == (5,)
        first.accept(token_id)
    assert first.is_finished
    third = constraint.start(frozenset())
    third.allowed()
    third.accept(3)
    third.accept(0)  # without a request for its mask
    assert np.flatnonzero(third.allowed()).tolist() == [3]
    assert len({id(second.allowed()) for _ in range(3)}) == 1, "no mask is allocated per token"
    assert np.flatnonzero(second.allowed()).tolist() == [3], "each completion has a position of its own"
