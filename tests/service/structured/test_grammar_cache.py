from radixkv.service.server.receive.fair_shares import QuotaKey
from radixkv.service.structured.compilation import Compilation
from radixkv.service.structured.grammar_cache import GrammarCache
from radixkv.service.structured.grammar_text import GrammarText

A, B, C = (QuotaKey.of_tenant(name) for name in "abc")


def regex(text):
    return GrammarText("regex", "regex", text)


def unfinished_compilation(text):
    return Compilation(regex(text))


def compiled(text):
    compilation = unfinished_compilation(text)
    compilation.end(text)
    return compilation


def cache_of(max_texts, **texts):
    """Return a cache with the given texts of each tenant; every letter is a text."""
    cache = GrammarCache(max_texts)
    for tenant, tenant_texts in texts.items():
        for text in tenant_texts:
            cache.add(QuotaKey.of_tenant(tenant), compiled(text))
    return cache


def texts_of(cache, quota_key):
    """Return the texts that are cached for a quota key, which makes them its latest ones."""
    return "".join(text for text in "pqrstuvw" if cache.find(quota_key, regex(text)) is not None)


def test_a_text_is_found_only_by_its_quota_key():
    cache = cache_of(4, a="p")
    assert cache.find(A, regex("p")).text == regex("p")
    assert cache.find(B, regex("p")) is None
    assert cache.find(A, regex("q")) is None


def test_the_least_recently_found_text_is_evicted_first():
    cache = cache_of(3, a="pqr")
    cache.find(A, regex("p"))
    cache.add(A, compiled("s"))
    assert texts_of(cache, A) == "prs"


def test_the_quota_key_with_most_texts_loses_one():
    cache = cache_of(4, b="p", a="pqr")
    cache.add(C, compiled("p"))
    assert [texts_of(cache, each) for each in (A, B, C)] == ["qr", "p", "p"]
    cache.add(B, compiled("q"))
    assert (len(cache), texts_of(cache, A)) == (4, "r")


def test_of_quota_keys_with_equally_many_texts_the_least_recently_used_loses_one():
    cache = cache_of(2, a="p", b="p")
    cache.find(A, regex("p"))
    cache.add(C, compiled("p"))
    assert [texts_of(cache, each) for each in (A, B, C)] == ["p", "", "p"]


def test_grammars_that_are_not_compiled_yet_stay():
    cache = GrammarCache(2)
    unfinished = [unfinished_compilation(text) for text in "pqrs"]
    for each in unfinished:
        cache.add(A, each)
    cache.add(B, compiled("p"))
    assert (texts_of(cache, A), texts_of(cache, B)) == ("pqrs", "")
    for each in unfinished:
        each.end("")
    cache.add(B, unfinished_compilation("q"))
    assert (texts_of(cache, A), texts_of(cache, B)) == ("s", "q")
