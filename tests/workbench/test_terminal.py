from __future__ import annotations

import sys

import pytest

from dropmax.workbench import terminal as module
from dropmax.workbench.terminal import progress


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("bytes", r"3 MB, .* MB/s, 75 %, .* s left"), ("images", r"3,000,000 images, .*/s, 75 %, .* s left")],
)
def test_lines_where_there_is_no_terminal(
    unit: str, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", -1)
    with progress("working", 4_000_000, unit, done=1_000_000) as advance:
        advance(2_000_000)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("working: ")
    assert "\r" not in captured.err
    import re

    assert re.search(expected, captured.err)


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("working", 10, "images") as advance:
        for _ in range(10):
            advance(1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("unit", ["bytes", "images"])
def test_a_bar_on_a_terminal(unit: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("working", 10, unit) as advance:
        advance(10)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "working" in captured.err
