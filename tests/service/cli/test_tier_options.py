import argparse

import pytest

from radixkv.planning.tiers import TierCapacity
from radixkv.service.cli.tier_options import TierSize, tier_capacities, tier_numbers, tier_sizes


def test_sizes_are_in_bytes_in_tokens_or_unbounded():
    assert tier_sizes("host=16GB, disk = 1.5TiB,redis=10.24M,far=Unbounded") == [
        TierSize("host", num_bytes=16 * 10**9),
        TierSize("disk", num_bytes=3 * 2**39),
        TierSize("redis", num_tokens=10_240_000),
        TierSize("far"),
    ]


def test_numbers_of_tiers_are_parsed_by_name():
    assert tier_numbers("host=40,disk=2.5") == {"host": 40.0, "disk": 2.5}
    with pytest.raises(argparse.ArgumentTypeError, match=r"^expected a positive number, got 0$"):
        tier_numbers("host=0")


def test_only_sizes_in_bytes_need_the_bytes_per_token():
    subjects = []

    def token_bytes_of(subject):
        subjects.append(subject)
        return 1024

    sizes = tier_sizes("host=1MiB,disk=1000,far=unbounded")
    # A block of 16 tokens takes 16,384 bytes of K/V and 256 bytes of key, tokens, checksum and padding.
    assert tier_capacities(sizes, token_bytes_of, 16) == [
        TierCapacity("host", 1_048_576 // 16_640 * 16),
        TierCapacity("disk", 1000),
        TierCapacity("far", None),
    ]
    assert subjects == ["--tier host in bytes"]
