from radixkv.service.server.receive.fair_shares import QuotaKey
from radixkv.service.structured.compilation import Compilation
from radixkv.service.structured.grammar_cache import GrammarCache
from radixkv.service.structured.grammar_text import GrammarText

A, B, C = (QuotaKey.of_tenant(name) for name in "abc")


def regex(text):
    return GrammarText("regex", "regex", text)


def waiting(text):
    return Compilation(regex(text))


def compiled(text):
    compilation = waiting(text)
    compilation.end(text)
    return compilation


def kept_with(max_texts, **texts):
    """Return a cache with texts of tenants, by the name of the tenant."""
    kept = GrammarCache(max_texts)
    for name, own in texts.items():
        for text in own:
            kept.add(QuotaKey.of_tenant(name), compiled(text))
    return kept


def left(kept, account):
    return "".join(text for text in "pqrstuvw" if kept.find(account, regex(text)) is not None)


def test_a_text_is_found_only_by_its_quota_key():
    kept = kept_with(4, a="p")
    assert kept.find(A, regex("p")).text == regex("p")
    assert kept.find(B, regex("p")) is None
    assert kept.find(A, regex("q")) is None


def test_the_oldest_text_is_evicted_first_and_a_found_one_is_the_latest():
    kept = kept_with(3, a="pqr")
    kept.find(A, regex("p"))
    kept.add(A, compiled("s"))
    assert left(kept, A) == "prs"


def test_the_quota_key_with_most_texts_loses_one():
    kept = kept_with(4, b="p", a="pqr")
    kept.add(C, compiled("p"))
    assert [left(kept, each) for each in (A, B, C)] == ["qr", "p", "p"]
    kept.add(B, compiled("q"))
    assert (len(kept), left(kept, A)) == (4, "r")


def test_of_equals_the_least_recently_used_quota_key_loses_its_text():
    kept = kept_with(2, a="p", b="p")
    kept.find(A, regex("p"))
    kept.add(C, compiled("p"))
    assert [left(kept, each) for each in (A, B, C)] == ["p", "", "p"]


def test_grammars_that_are_not_compiled_yet_stay():
    kept = GrammarCache(2)
    unfinished = [waiting(text) for text in "pqrs"]
    for each in unfinished:
        kept.add(A, each)
    kept.add(B, compiled("p"))
    assert (left(kept, A), left(kept, B)) == ("pqrs", "")
    for each in unfinished:
        each.end("")
    kept.add(B, waiting("q"))
    assert (left(kept, A), left(kept, B)) == ("s", "q")
