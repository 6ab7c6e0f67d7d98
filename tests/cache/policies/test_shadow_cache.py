from __future__ import annotations

from radixkv.cache.policies.shadow_cache import BlockSampler, ShadowCache
from radixkv.cache.prefix_cache import PrefixCache
from tests.fakes import MODEL, FakeClock, publish


def test_a_shadow_cache_lets_the_smallest_key_go() -> None:
    shadow = ShadowCache()
    for digest, key, was_held in ((1, 5.0, False), (2, 3.0, False), (3, 4.0, False), (1, 2.0, True)):
        assert shadow.use([digest], key, key, 3) == [was_held]
    assert shadow.use([4, 3], 9.0, 4.0, 3) == [False, True]  # the newest key of a block counts
    assert [digest in shadow for digest in (1, 2, 3, 4)] == [False, True, True, True]
    for index in range(1000):
        shadow.use([index % 5], float(index), float(index), 3)
    assert len(shadow) == 3
    assert len(shadow._line) <= 13


def test_the_same_prefixes_are_sampled_wherever_nodes_begin() -> None:
    def samples(*texts: str) -> list[tuple[int, int]]:
        """Depth in blocks and digest."""
        cache = PrefixCache(1000, 4, clock=FakeClock())
        for text in texts:
            publish(cache, text)
        sampler = BlockSampler(1000)
        found = []
        for node in cache._trees[MODEL].nodes():
            depth, above = 0, node.parent
            while above is not None:
                depth, above = depth + above.num_blocks, above.parent
            found += [(depth + index, digest) for index, digest in sampler.sample(node, 0)]
        return sorted(found)

    text = "".join(chr(97 + index % 26) * 4 for index in range(500))
    whole = samples(text)
    assert [depth for depth, _ in whole] == [127, 255, 383]  # every 512 tokens of four a block
    assert samples(text, text[:800] + "?" * 40) == whole
