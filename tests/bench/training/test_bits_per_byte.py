import random
import zlib

import pytest

from bench.training.bits_per_byte import COMPRESSORS, gzip_bits, xz_bits

WORDS = ["the", "lord", "said", "unto", "her", "sister", "with", "great", "pleasure"]
RNG = random.Random(0)
TEXT, EARLIER_TEXT = (" ".join(RNG.choices(WORDS, k=num_words)).encode() for num_words in (2000, 20_000))


@pytest.mark.parametrize("bits", COMPRESSORS.values(), ids=COMPRESSORS)
def test_text_that_was_read_before_takes_fewer_bits(bits) -> None:  # type: ignore[no-untyped-def]
    assert bits(TEXT, EARLIER_TEXT + TEXT) < 0.1 * bits(TEXT, b"")
    assert bits(TEXT, EARLIER_TEXT) < 1.01 * bits(TEXT, b"")


def test_gzip_has_the_size_of_zlib_and_reuses_only_its_window() -> None:
    assert abs(gzip_bits(TEXT) - 8 * len(zlib.compress(TEXT, 9))) < 100
    assert gzip_bits(TEXT, TEXT + bytes(40_000)) > 0.5 * gzip_bits(TEXT)


def test_xz_reuses_the_whole_earlier_text() -> None:
    assert xz_bits(TEXT, TEXT + bytes(40_000)) < 0.1 * xz_bits(TEXT)
