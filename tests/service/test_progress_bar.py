"""Progress bars on a terminal, and where standard error is not a terminal."""

from __future__ import annotations

import sys

import pytest

from radixkv.service.progress_bar import progress_bar


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("wanted", [None, True, False])
def test_a_progress_bar_is_shown_if_requested_or_on_a_terminal(
    wanted: bool | None,
    is_terminal: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with progress_bar("Computed prompts", 3, is_shown=wanted, is_kept=True) as advance:
        for _ in range(3):
            advance()
    shown = capsys.readouterr().err
    assert ("Computed prompts" in shown) == (is_terminal if wanted is None else wanted)
    assert ("3/3" in shown) == ("Computed prompts" in shown)


def test_a_bar_appears_after_a_delay(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("Computed prompts", 3, is_shown=True, delay_s=3600, is_kept=False) as advance:
        advance()
    assert "1/3" not in capsys.readouterr().err
