"""The kill campaign in its short form, and whether it would notice: work that breaks each of its promises."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dropmax.errors import RunError
from dropmax.workbench.files import write_atomically
from hardening import kills
from hardening.campaign import Outcome
from hardening.disks import SizeLimit, fill_the_disk
from hardening.lives import live

Work = Callable[[Path], None]


def test_the_short_campaign_finds_nothing_broken(tmp_path: Path) -> None:
    outcome = kills.run(short=True, seed=0, scratch=tmp_path)
    assert outcome.failures == []
    wanted = {name: short for name, (_, short) in kills.KILLS.items() if short}
    assert {name: number for name, number in outcome.details["kills"].items() if number} == wanted
    assert outcome.counts["ended in the same bytes"] >= len(wanted)
    assert outcome.details["full disk"]


# --- work that is good, and work that is not -----------------------------------------------------------------------


def careful(place: Path) -> None:
    """Count to ten in a file, whole at every moment; go on where it was."""
    place.mkdir(exist_ok=True)
    file = place / "count.json"
    for number in range(json.loads(file.read_text()) if file.exists() else 0, 10):
        time.sleep(0.01)
        write_atomically(file, json.dumps(number + 1))


def leaves_litter(place: Path) -> None:
    place.mkdir(exist_ok=True)
    tempfile.mkstemp(dir=place, prefix=".", suffix=".tmp")
    careful(place)
    if len(list(place.glob(".*.tmp"))) == 1:
        next(place.glob(".*.tmp")).unlink()


def writes_in_place(place: Path) -> None:
    place.mkdir(exist_ok=True)
    with open(place / "count.json", "w") as file:
        for text in ("[", "1", ",", "2", "]"):
            file.write(text)
            file.flush()
            time.sleep(0.03)


def counts_twice(place: Path) -> None:
    place.mkdir(exist_ok=True)
    with open(place / "lives.jsonl", "a") as file:
        file.write("1\n")
    careful(place)


def cannot_go_on(place: Path) -> None:
    if place.exists():
        raise RunError("there is something here")
    careful(place)


@pytest.mark.parametrize(
    ("work", "kind", "line"),
    [
        (leaves_litter, "ended in other bytes", "was left behind"),
        (writes_in_place, "half-written", "count.json is there by half"),
        (counts_twice, "ended in other bytes", "lives.jsonl has other bytes"),
        (cannot_go_on, "could not go on", "RunError: there is something here"),
    ],
)
def test_it_notices(work: Work, kind: str, line: str, tmp_path: Path) -> None:
    outcome = Outcome()
    kills.kill_until_done(kills.Target("bad work", work), tmp_path, 8, random.Random(0), outcome)
    assert outcome.counts["killed in bad work"] == 8
    assert outcome.counts[kind] >= 1
    assert any(line in failure for failure in outcome.failures)


def test_it_has_nothing_against_careful_work(tmp_path: Path) -> None:
    outcome = Outcome()
    kills.kill_until_done(kills.Target("good work", careful), tmp_path, 8, random.Random(0), outcome)
    assert (outcome.failures, outcome.counts["killed in good work"]) == ([], 8)
    assert outcome.counts["ended in the same bytes"] >= 1


def test_work_that_fails_undisturbed_is_reported(tmp_path: Path) -> None:
    outcome = Outcome()
    (tmp_path / "reference").mkdir()
    kills.kill_until_done(kills.Target("bad work", cannot_go_on), tmp_path, 3, random.Random(0), outcome)
    assert outcome.failures == ["bad work: undisturbed, RunError: there is something here"]


# --- full disks ----------------------------------------------------------------------------------------------------


def large_and_careful(place: Path) -> None:
    place.mkdir(exist_ok=True)
    for index in range(4):
        write_atomically(place / f"{index}.json", json.dumps([index] * 10_000))


def large_and_careless(place: Path) -> None:
    place.mkdir(exist_ok=True)
    with open(place / "0.json", "w") as file:
        file.write(json.dumps([7] * 100_000))


@pytest.mark.parametrize("kind", ["whatever there is", "file size"])
@pytest.mark.parametrize(("work", "good"), [(large_and_careful, True), (large_and_careless, False)])
def test_a_full_disk(kind: str, work: Work, good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "file size":  # as where no tmpfs can be mounted
        monkeypatch.setenv("PATH", str(tmp_path))
    outcome = Outcome()
    target = kills.Target("work", work)
    fill_the_disk(target, tmp_path / "disk", 3, random.Random(0), outcome, kills.contents, kills.torn)
    if kind == "file size":
        assert outcome.details["full disk"] == SizeLimit.description
    assert outcome.counts["work: disk full"] == 3
    assert (outcome.failures == []) is good
    if not good:
        assert any("it ended in OSError" in line for line in outcome.failures)
        assert any("0.json is there by half" in line for line in outcome.failures)


# --- lives ---------------------------------------------------------------------------------------------------------


def test_lives_end_in_every_way() -> None:
    def fail() -> None:
        raise RunError("no")

    assert live(lambda: None).done
    killed = live(lambda: time.sleep(60), kill_after=0.05)
    assert (killed.kills, killed.done, killed.error) == (1, False, "")
    assert killed.seconds < 30
    failed = live(fail)
    assert (failed.error, failed.ours, failed.done) == ("RunError: no", True, False)
    assert live(lambda: [][0]).ours is False
    assert "status 3" in live(lambda: os._exit(3)).error
    assert "status -10" in live(lambda: os.kill(os.getpid(), signal.SIGUSR1)).error


def test_a_child_can_be_killed_in_place_of_its_parent() -> None:
    import subprocess

    def parent() -> None:
        assert subprocess.run(["sleep", "60.25"]).returncode == -9

    life = live(parent, kill_after=0.3, victim="sleep 60.25")
    assert (life.kills, life.done, life.error) == (1, True, "")
