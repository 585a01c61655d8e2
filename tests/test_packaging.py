"""What a user installs: the wheel and the source archive, from outside the source tree."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LARGEST = 5_000_000


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**outside, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def installed(archives: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel in it; only what the wheel depends on is borrowed from this one."""
    home = tmp_path_factory.mktemp("fresh")
    venv.create(home, with_pip=True)
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", next(archives.glob("*.whl")), cwd=home)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    # A directory named in a .pth file joins the path, but the .pth files in it (our editable install) are not followed.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_the_archives_hold_what_is_needed_and_nothing_large(archives: Path) -> None:
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel:
        sizes = {file.filename: file.file_size for file in wheel.infolist()}
    with tarfile.open(next(archives.glob("*.tar.gz"))) as source:
        sizes |= {file.name.split("/", 1)[-1]: file.size for file in source.getmembers()}
    assert {name: size for name, size in sizes.items() if size > LARGEST} == {}
    data = ("recipes.toml", "data/embedded/mnist-20k.xz")
    needed = {"dropmax/py.typed", *(f"dropmax/workbench/{name}" for name in data), "tests/conftest.py", "README.md"}
    assert needed - set(sizes) == set()


def test_the_installed_package_runs_its_demo_from_elsewhere(installed: Path, tmp_path: Path) -> None:
    where = run(installed, "-c", "import dropmax; print(dropmax.__file__)", cwd=tmp_path)
    assert str(installed.parent.parent) in where
    found = json.loads(run(installed.parent / "dropmax", "demo", "--quick", "--json", "--out", "demo", cwd=tmp_path))
    assert set(found["test"]) == {"softmax", "dropmax"}
    assert all(result["error"] < 0.5 for result in found["test"].values())  # 10 epochs, chance is 0.9
    assert (tmp_path / "demo" / "demo-quick.png").stat().st_size > 10_000


def test_the_command_completes_in_the_shell(installed: Path, tmp_path: Path) -> None:
    command = installed.parent / "dropmax"
    script = run(command, "--show-completion", "bash", cwd=tmp_path, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_DROPMAX_COMPLETE=complete_bash" in script
    words = run(command, cwd=tmp_path, _DROPMAX_COMPLETE="complete_bash", COMP_WORDS="dropmax re", COMP_CWORD="1")
    assert "reproduce" in words.split()


def test_everything_that_development_installs_is_pinned() -> None:
    """Follows the requirements of all extras through what is installed here."""
    if os.environ.get("CONSTRAINTS", "constraints.txt") != "constraints.txt":
        pytest.skip("other versions than the pinned ones were asked for")
    import tomllib
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [one for group in project["optional-dependencies"].values() for one in group]
    todo = [(Requirement(one), "") for one in [*project["dependencies"], *extras]]
    found = importlib.metadata.distributions()
    installed = {canonicalize_name(one.metadata["Name"]): one.requires or [] for one in found}
    installed.pop("dropmax")
    seen: set[tuple[str, str]] = set()
    while todo:
        requirement, extra = todo.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for one in ["", *requirement.extras]:
            if name in installed and (name, one) not in seen:
                seen.add((name, one))
                todo += [(Requirement(need), one) for need in installed[name]]
    assert len(seen) > 100
    assert {name for name, _ in seen} - pins == set()


def test_importing_the_heads_brings_nothing_but_torch(tmp_path: Path) -> None:
    code = """
import sys
import torch
before = set(sys.modules)
import dropmax
dropmax.DropMax, dropmax.exact, dropmax.functional, dropmax.Classifier
names = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(name for name in names if name not in sys.stdlib_module_names and name != "torch"))
"""
    assert run(sys.executable, "-c", code, cwd=tmp_path).strip() == "['dropmax']"


def test_importing_the_package_does_not_even_bring_torch(tmp_path: Path) -> None:
    code = "import sys, dropmax, dropmax.cli; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert run(sys.executable, "-c", code, cwd=tmp_path).strip() == "False False"
