"""``python -m hardening``: what it keeps, what it refuses, how it ends."""

from __future__ import annotations

import json
import sys
from io import StringIO
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from hardening.__main__ import main
from hardening.campaign import Outcome


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """Stand in for the campaign ``numerics``: what it will have found."""
    found = Outcome(tried=3, counts={"fine": 3})
    module = ModuleType("hardening.numerics")
    module.run = lambda *, short, seed, scratch: found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hardening.numerics", module)
    return found


def run(*arguments: str) -> tuple[int, str]:
    output = StringIO()
    return main(arguments, Console(file=output, width=200)), output.getvalue()


def test_counts_are_kept_with_the_command_and_the_seed(tmp_path: Path, outcome: Outcome) -> None:
    status, output = run("numerics", "--seed", "4", "--out", str(tmp_path / "new"))
    kept = json.loads((tmp_path / "new/numerics.json").read_text())
    assert status == 0
    assert "3 tried, 0 broken" in output
    assert (kept["campaign"], kept["tried"], kept["counts"]) == ("numerics", 3, {"fine": 3})
    assert kept["provenance"]["seeds"] == [4]
    assert kept["provenance"]["command"].startswith("python -m hardening numerics --seed 4")
    assert run("numerics", "--out", str(tmp_path / "new"))[0] == 0  # its own counts may be replaced


def test_a_broken_promise_is_said_and_ends_with_one(tmp_path: Path, outcome: Outcome) -> None:
    outcome.failed, outcome.failures = 1, ["softmax: [nan]"]
    status, output = run("numerics", "--short", "--out", str(tmp_path))
    assert status == 1
    assert "BROKEN softmax: [nan]" in output
    assert [path.name for path in tmp_path.iterdir()] == ["numerics.short.json"]


@pytest.mark.usefixtures("outcome")
@pytest.mark.parametrize("content", ["my notes", "[]", '{"campaign": "kills"}'])
def test_a_file_of_somebody_elses_is_left_alone(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "numerics.json"
    mine.write_text(content)
    assert run("numerics", "--out", str(tmp_path))[0] == 2
    assert "numerics.json exists and is not an outcome of the campaign 'numerics'" in capsys.readouterr().err
    assert mine.read_text() == content


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["kils"], "unknown campaign 'kils': did you mean 'kills'? The campaigns are kills, "),
        (["kills", "--out", "/dev/null/here"], "cannot write to /dev/null/here: /dev/null is not a directory"),
    ],
)
def test_mistakes_are_found_before_hours_of_work(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments)[0] == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {said}")
    assert error.count("\n") == 1
