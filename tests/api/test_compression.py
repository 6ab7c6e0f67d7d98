import pytest

from radixkv.api.compression import Compression, CompressionPolicy
from radixkv.api.sampling import Sampling
from radixkv.errors import InvalidRequest

STREAMING_LLM, H2O, SNAPKV = CompressionPolicy


@pytest.mark.parametrize(
    ("compression", "sinks", "recent"),
    [
        (Compression(STREAMING_LLM, 16), 4, 12),
        (Compression(STREAMING_LLM, 3), 2, 1),
        (Compression(STREAMING_LLM, 16, num_sinks=0), 0, 16),
        (Compression(H2O, 16), 0, 8),
        (Compression(H2O, 2), 0, 1),
        (Compression(H2O, 16, window=15), 0, 15),
        (Compression(SNAPKV, 16), 0, 8),
        (Compression(SNAPKV, 1000), 0, 32),
        (Compression(SNAPKV, 1000, window=256), 0, 256),
    ],
)
def test_omitted_fields_have_defaults_within_their_bounds(compression: Compression, sinks: int, recent: int) -> None:
    Sampling(compression=compression).validate(vocab_size=100)
    assert (compression.sinks, compression.recent) == (sinks, recent)


@pytest.mark.parametrize(
    ("compression", "message"),
    [
        (Compression(H2O, 1), "compression.max_tokens: expected at least 2, got 1"),
        (Compression(H2O, 16, num_sinks=4), "compression.num_sinks: expected none with h2o, got 4"),
        (Compression(SNAPKV, 16, num_sinks=0), "compression.num_sinks: expected none with snapkv, got 0"),
        (Compression(STREAMING_LLM, 16, window=4), "compression.window: expected none with streaming_llm, got 4"),
        (Compression(STREAMING_LLM, 16, num_sinks=16), "compression.num_sinks: expected 0 to 15, below max_tokens"),
        (Compression(H2O, 16, window=16), "compression.window: expected 1 to 15 with h2o, got 16"),
        (Compression(H2O, 16, window=0), "compression.window: expected 1 to 15 with h2o, got 0"),
        (Compression(SNAPKV, 1000, window=257), "compression.window: expected 1 to 256 with snapkv, got 257"),
    ],
)
def test_the_message_names_the_field_that_is_wrong(compression: Compression, message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        Sampling(compression=compression).validate(vocab_size=100)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("compression", "num_prompt_tokens", "max_new_tokens", "max_entries"),
    [
        (Compression(STREAMING_LLM, 16), 100, 50, 16),
        (Compression(H2O, 16), 3, 4, 3 + 3),  # the last new token has no K/V
        (Compression(SNAPKV, 16), 100, 50, 16 + 49),
        (Compression(SNAPKV, 16), 3, 4, 3 + 3),
    ],
)
def test_entries_are_bounded_by_budget_and_length(
    compression: Compression, num_prompt_tokens: int, max_new_tokens: int, max_entries: int
) -> None:
    assert compression.max_entries(num_prompt_tokens, max_new_tokens) == max_entries
