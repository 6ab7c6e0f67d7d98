from radixkv.service.cli.terminal import align_columns, percent


def test_columns_are_as_wide_as_their_widest_cell():
    assert align_columns([("a", "bcd", "e"), ("fgh", "i"), ("j",)]) == ["a    bcd  e", "fgh  i", "j"]


def test_numbers_are_right_aligned():
    assert align_columns([("name", "n"), ("a", "100")], is_right=True) == ["name    n", "a     100"]


def test_text_of_callers_cannot_control_the_terminal():
    assert align_columns([("tenant \x1b[2J", "1"), ("é\n", "2")]) == ["tenant \\x1b[2J  1", "é\\n             2"]


def test_a_share_of_zero_is_not_shown():
    assert (percent(1, 3), percent(0, 0)) == (" (33.3 %)", "")
