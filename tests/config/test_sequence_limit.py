from __future__ import annotations

from typing import Any

import pytest

from radixkv.config.sequence_limit import sequence_limit, use_long_factors

# As in Phi-3: sequences of up to 4,096 tokens use the short factors at all positions, longer ones the long factors.
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [4.0, 8.0]}
PHI = {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096, "rope_scaling": LONGROPE}


@pytest.mark.parametrize(
    ("config", "max_tokens", "stated_tokens", "reason"),
    [
        ({}, None, None, ""),
        ({"max_position_embeddings": 2048}, 2048, 2048, ""),
        ({"n_positions": 1024}, 1024, 1024, ""),
        ({"max_position_embeddings": True}, None, None, ""),
        ({"max_position_embeddings": "many"}, None, None, ""),
        (PHI, 4096, 131_072, "longrope"),
        ({**PHI, "rope_scaling": {**LONGROPE, "rope_type": None, "type": "su"}}, 4096, 131_072, "longrope"),
        ({**PHI, "rope_scaling": {**LONGROPE, "rope_type": "yarn"}}, 4096, 131_072, "longrope"),  # early Phi-3
        ({**PHI, "rope_scaling": None, "rope_parameters": LONGROPE}, 4096, 131_072, "longrope"),
        ({**PHI, "rope_scaling": {**LONGROPE, "long_factor": [1.0, 1.0]}}, 131_072, 131_072, ""),
        ({**PHI, "original_max_position_embeddings": 131_072}, 131_072, 131_072, ""),
        (
            {
                "max_position_embeddings": 8192,
                "rope_parameters": {"a": {**LONGROPE, "original_max_position_embeddings": 512}, "b": {}},
            },
            512,
            8192,
            "longrope",
        ),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 4}}, 2048, 8192, "dynamic"),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 1.0}}, 2048, 2048, ""),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 4}}, 2048, 2048, ""),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "yarn", "factor": 4}}, 2048, 2048, ""),
        ({"max_position_embeddings": 2048, "rope_scaling": "yarn"}, 2048, 2048, ""),
    ],
)
def test_the_limit_is_that_up_to_which_rotation_depends_on_the_position_alone(
    config: dict[str, Any], max_tokens: int | None, stated_tokens: int | None, reason: str
) -> None:
    limit = sequence_limit(config)
    assert (limit.max_tokens, limit.stated_tokens) == (max_tokens, stated_tokens)
    assert reason in limit.reason
    assert bool(limit.reason) == bool(reason)
    assert bool(limit.explanation) == bool(reason)


def test_long_factors_for_all_positions_lift_the_limit() -> None:
    config = {**PHI, "rope_scaling": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3}}
    assert use_long_factors(config)
    assert sequence_limit(config).max_tokens == 131_072
    assert config["rope_scaling"]["short_factor"] == [4.0, 8.0]
    assert config["rope_scaling"]["short_mscale"] == 1.3
    assert not use_long_factors({"rope_scaling": {"type": "linear", "factor": 4}})
    assert not use_long_factors({})
