"""``dropmax figures`` and ``dropmax report`` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import Run

pytest.importorskip("matplotlib", reason="needs matplotlib (the extra `figures`)")


def test_figures_needs_no_run_for_some(dropmax: Run, tmp_path: Path) -> None:
    done = dropmax("figures", "--only", "architecture", "--format", "svg", "--out", tmp_path / "new" / "place")
    assert done.returncode == 0, done.stderr
    assert "place/architecture.svg" in done.stdout
    captions = (tmp_path / "new" / "place" / "captions.md").read_text()
    assert "- command: `dropmax figures --only architecture --format svg --out" in captions


def test_figures_says_why_others_were_not_made(dropmax: Run, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "figures"
    done = dropmax("figures", run, "--only", "convergence,confusion-graph", "--format", "png", "--out", out, "--json")
    found = json.loads(done.stdout)
    assert [Path(one["files"][0]).name for one in found["made"]] == ["convergence.png", "confusion-graph-mnist-1k.png"]
    assert found["not_made"] == []
    again = dropmax("figures", run, "--only", "convergence", "--out", out)
    assert again.returncode == 2
    assert "convergence.png would be overwritten: use --force" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nose"], "unknown figure 'nose': did you mean 'noise'?"),
        (["--only", "noise"], "the figure noise needs a dropmax run on images, and no run was given"),
        (["--only", "contours", "--format", "png,gif"], "unknown format 'gif'"),
        (["nowhere"], "there is no directory nowhere: `dropmax train` makes one"),
    ],
)
def test_figures_refuses_in_one_line(dropmax: Run, tmp_path: Path, arguments: list[str], message: str) -> None:
    done = dropmax("figures", *arguments, "--out", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("dropmax: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_figures_list(dropmax: Run) -> None:
    rows = json.loads(dropmax("figures", "--list", "--json").stdout)
    assert {"figure", "paper", "needs", "caption"} == set(rows[0])
    assert "retain-profiles" in dropmax("figures", "--list").stdout


def test_report_writes_a_new_file_only(dropmax: Run, run: Path, tmp_path: Path) -> None:
    done = dropmax("report", run, "--out", "r.html", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["runs"][0]["method"] == "dropmax"
    assert 0 < found["runs"][0]["error"] < 0.5
    text = (tmp_path / "r.html").read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "--out r.html --json" in text
    again = dropmax("report", run, "--out", "r.html", cwd=tmp_path)
    assert again.returncode == 2
    assert again.stderr == "dropmax: r.html exists: choose another file with --out, or replace it with --force\n"


def test_report_refuses_in_one_line(dropmax: Run, tmp_path: Path) -> None:
    done = dropmax("report", "nowhere", "--out", "r.html", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "dropmax: there is no directory nowhere: `dropmax train` makes one\n"
    done = dropmax("report", "nowhere", "--out", "no/such/place.html", cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no directory no/such; name a file in an existing directory with --out" in done.stderr
