"""Import paths that the documentation named before the package was laid out in four floors still work."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from dropmax._moved import MOVED

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"

#: What README, docs and examples named when the modules moved: module, then names in it.
DOCUMENTED = """
dropmax.blocked
dropmax.data Batches load
dropmax.data.images decode
dropmax.diagnostics
dropmax.evaluation confusable predict
dropmax.experiments
dropmax.export export
dropmax.figures.registry make_figures
dropmax.figures.runs load_runs
dropmax.hub from_pretrained save_pretrained
dropmax.metrics t_interval
dropmax.recipes load_recipe
dropmax.training TensorBoard load_data load_model train
"""


@pytest.mark.parametrize("line", DOCUMENTED.split("\n")[1:-1])
def test_documented_names_still_import(line: str) -> None:
    module, *names = line.split()
    found = importlib.import_module(module)
    for name in names:
        assert getattr(found, name) is not None


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_gives_the_module_of_the_new_one(old: str) -> None:
    if old == "dropmax.explorer":
        pytest.importorskip("fastapi")
    if old == "dropmax.figures":
        pytest.importorskip("matplotlib")
    assert importlib.import_module(old) is importlib.import_module(MOVED[old])


def test_the_changelog_lists_every_path_that_moved() -> None:
    rows = re.findall(r"^\| (`dropmax\..*?) \| `(dropmax\.[\w.]+)` \|$", CHANGELOG.read_text("utf-8"), re.MULTILINE)
    listed = {}
    for old, new in rows:
        for name in re.findall(r"`(dropmax\.\w+)`", old):
            listed[name] = new if new in MOVED.values() else f"{new}.{name.rpartition('.')[2]}"
    assert listed == MOVED
