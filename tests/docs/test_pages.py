"""The site builds, the notebook runs, and every Python block of README and docs runs, in one namespace per page.

A block that needs more than the page shows is preceded by ``<!-- before: CODE -->``, which a reader does not see. Files
are written in a temporary directory.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- before:\s*(.*?)-->\s*)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WITH_BLOCKS = [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.stem)
def test_every_python_block_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))  # a page may use what lies in examples/
    torch.manual_seed(0)
    text = page.read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": page.stem}
    for match in BLOCK.finditer(text):
        line = text[: match.start(2)].count("\n")
        for code, start in ((match[1] or "", 0), (match[2], line)):
            exec(compile("\n" * start + code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_a_page_shows_or_links_to_is_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if "://" not in target and target != "commands.md":  # that page is made when the site is
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    commands = (tmp_path / "site/commands.html").read_text(encoding="utf-8")
    assert "dropmax reproduce" in commands
    for page in (tmp_path / "site").rglob("*.html"):
        outside = re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(https?:)?//", page.read_text("utf-8"))
        assert not outside, f"{page} asks another host for something"


@pytest.mark.heavy
def test_the_notebook_runs_and_dropmax_has_the_better_probabilities(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(ROOT / "docs/notebooks/two-minutes.ipynb", as_version=4)
    done = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in done.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    nll = dict(re.findall(r"^(softmax|dropmax) .*nll ([\d.]+)", text, re.MULTILINE))
    assert float(nll["dropmax"]) < float(nll["softmax"])
    assert len(re.findall(r"^a \d, read as a \d", text, re.MULTILINE)) == 8
    off = [float(value) for value in re.findall(r"off by up to ([\d.]+)", text)]
    assert off == sorted(off, reverse=True)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


def test_every_module_of_the_core_is_on_the_map_and_in_the_contract() -> None:
    core = {path.stem for path in (ROOT / "src" / "dropmax").iterdir() if not path.name.startswith(("_", "."))}
    core -= {"cli", "lab", "workbench", "py"}
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("source_modules")[2].partition("]")[0]
    shown = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for name in core:
        assert f"`{name}.py`" in shown or f"`{name}/`" in shown, f"CONTRIBUTING.md does not say what {name} is"
        assert f'"dropmax.{name}"' in contract or name.startswith("sklearn"), f"no contract holds {name} in the core"
