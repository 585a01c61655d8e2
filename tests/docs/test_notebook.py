"""The notebook runs from top to bottom, and says what its text says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs/notebooks/two-minutes.ipynb"


def test_the_notebook_runs_and_dropmax_has_the_better_probabilities(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    done = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    nll = dict(re.findall(r"^(softmax|dropmax) .*nll ([\d.]+)", text, re.MULTILINE))
    assert float(nll["dropmax"]) < float(nll["softmax"])
    assert len(re.findall(r"^a \d, read as a \d", text, re.MULTILINE)) == 8
    off = [float(value) for value in re.findall(r"off by up to ([\d.]+)", text)]
    assert off == sorted(off, reverse=True)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
