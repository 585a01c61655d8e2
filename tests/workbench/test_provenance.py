"""Where a number came from: the right commit, marked where the sources differ from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import dropmax.workbench.provenance
from dropmax.workbench.provenance import provenance


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    return subprocess.run(
        ["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def commit_seen_from(root: Path) -> str:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from dropmax.workbench import provenance as p; print(p.commit())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(root / "src")], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def copied_into(root: Path) -> Path:
    package = root / "dropmax"
    (package / "workbench").mkdir(parents=True)
    for folder in (package, package / "workbench"):
        (folder / "__init__.py").write_text("")
    shutil.copy(dropmax.workbench.provenance.__file__, package / "workbench" / "provenance.py")
    return package


def test_the_commit_is_marked_where_the_sources_differ_from_it(tmp_path: Path) -> None:
    package = copied_into(tmp_path / "src")
    assert commit_seen_from(tmp_path) == "None"  # no checkout
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "all")
    (tmp_path / "notes.txt").write_text("not a source")
    (package / "__pycache__").mkdir(exist_ok=True)
    (tmp_path / ".gitignore").write_text("__pycache__/\n")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert commit_seen_from(tmp_path) == head
    (package / "new.py").write_text("")
    assert commit_seen_from(tmp_path) == f"{head}-dirty"
    (package / "new.py").unlink()
    (package / "__init__.py").write_text("changed = True\n")
    assert commit_seen_from(tmp_path) == f"{head}-dirty"


def test_a_commit_of_somebody_elses_checkout_is_not_ours(tmp_path: Path) -> None:
    copied_into(tmp_path / ".venv" / "src")
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "theirs")
    assert commit_seen_from(tmp_path / ".venv") == "None"


def test_it_names_command_seeds_and_versions() -> None:
    found = provenance("dropmax demo", seeds=[1, 2])
    assert (found["command"], found["seeds"]) == ("dropmax demo", [1, 2])
    assert {"python", "torch", "numpy", "dropmax"} <= set(found["versions"])
    assert found["machine"]["threads"] >= 1
