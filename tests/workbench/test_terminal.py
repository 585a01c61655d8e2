from __future__ import annotations

import re
import sys

import pytest

from dropmax.workbench.terminal import progress


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("bytes", r"3 MB, .* MB/s, 75 %, .* s left"), ("images", r"3,000,000 images, .*/s, 75 %, .* s left")],
)
def test_lines_where_there_is_no_terminal(
    unit: str, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, says in ((60, r"\A\Z"), (-1, rf"\Aworking: {expected}$")):  # short work says nothing
        monkeypatch.setattr("dropmax.workbench.terminal._SECONDS_BETWEEN_LINES", seconds)
        with progress("working", 4_000_000, unit, done=1_000_000) as advance:
            advance(2_000_000)
        captured = capsys.readouterr()
        assert captured.out == ""
        assert re.search(says, captured.err)
        assert "\r" not in captured.err


@pytest.mark.parametrize("unit", ["bytes", "images"])
def test_a_bar_on_a_terminal(unit: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("working", 10, unit) as advance:
        advance(10)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "working" in captured.err
