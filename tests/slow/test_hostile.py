"""Hostile files: nothing they hold is run, nothing is written elsewhere, and no name reaches a terminal or page raw."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from dropmax.errors import DropMaxError
from tests.slow import hostile_code, hostile_places, hostile_text
from tests.slow.hostile import Attack, Ground
from tests.slow.rounds import ROUNDS

SHORT = ROUNDS == 1
ATTACKS: dict[str, Attack] = {
    **hostile_code.attacks(SHORT), **hostile_places.attacks(), **hostile_text.attacks(SHORT),
}  # fmt: skip


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    monkeypatch.setenv("DROPMAX_CACHE", str(tmp_path / "cache"))
    made = Ground.make(tmp_path / "ground")
    yield made
    assert made.wrongs() == []


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_works(name: str, ground: Ground) -> None:
    with contextlib.suppress(DropMaxError):  # refusing is an answer
        ATTACKS[name](ground)


def test_code_that_runs_and_victims_that_are_touched_are_noticed(tmp_path: Path) -> None:
    ground = Ground.make(tmp_path / "ground")
    assert ground.wrongs() == []
    ground.mark.touch()
    (ground.victim / "diary.txt").write_text("changed")
    (ground.victim.parent / "elsewhere").touch()
    assert ground.wrongs() == [
        "hostile code ran", "the victim's files were changed", "'elsewhere' was written outside",
    ]  # fmt: skip
    page = hostile_text._Page(
        "<p onclick=x><a href=' java\nscript:1'>x</a><img src='data:image/png'></p><script></script>"
    )
    assert page.live == ["p onclick=x", "a href= java\nscript:1", "script"]
