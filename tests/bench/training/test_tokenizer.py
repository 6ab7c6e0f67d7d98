from bench.training.tokenizer import load_tokenizer


def test_a_novel_is_encoded_without_a_warning(caplog) -> None:  # type: ignore[no-untyped-def]
    text = "It is a truth universally acknowledged. " * 10_000
    assert load_tokenizer().decode(load_tokenizer().encode(text)) == text
    assert not caplog.records
