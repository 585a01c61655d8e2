"""``dropmax figures`` and ``dropmax report`` as a user types them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.asking import answer, as_json, refusal, refused_at_once

pytest.importorskip("matplotlib", reason="needs matplotlib (the extra `figures`)")


def test_figures_needs_no_run_for_some(tmp_path: Path) -> None:
    out = tmp_path / "new" / "place"
    said = answer("figures", "--only", "architecture", "--format", "svg", "--out", out)
    assert "place/architecture.svg" in said
    captions = (out / "captions.md").read_text()
    assert "- command: `dropmax figures --only architecture --format svg --out" in captions


def test_figures_says_why_others_were_not_made(run: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "figures")
    found = as_json("figures", run, "--only", "convergence,confusion-graph", "--format", "png", *out)
    assert [Path(one["files"][0]).name for one in found["made"]] == ["convergence.png", "confusion-graph-mnist-1k.png"]
    assert found["not_made"] == []
    said = refusal("figures", run, "--only", "convergence", *out)
    assert "convergence.png would be overwritten: use --force" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nose"], "unknown figure 'nose': did you mean 'noise'?"),
        (["--only", "noise"], "the figure noise needs a dropmax run on images, and no run was given"),
        (["--only", "contours", "--format", "png,gif"], "unknown format 'gif'"),
        (["nowhere"], "there is no directory nowhere: `dropmax train` makes one"),
    ],
)
def test_figures_refuses_in_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    refused_at_once(message, "figures", *arguments, cwd=tmp_path)


def test_figures_list() -> None:
    assert set(as_json("figures", "--list")[0]) == {"figure", "paper", "needs", "caption"}
    assert "retain-profiles" in answer("figures", "--list")


def test_report_writes_a_new_file_only(run: Path, tmp_path: Path) -> None:
    found = as_json("report", run, "--out", "r.html", cwd=tmp_path)
    assert found["runs"][0]["method"] == "dropmax"
    assert 0 < found["runs"][0]["error"] < 0.5
    text = (tmp_path / "r.html").read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "--out r.html --json" in text
    again = refusal("report", run, "--out", "r.html", cwd=tmp_path)
    assert again == "dropmax: r.html exists: choose another file with --out, or replace it with --force\n"
