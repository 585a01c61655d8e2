"""What ``--help`` says, how quickly, and the commands that are printed to be pasted."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dropmax as package
from dropmax.cli.options import HEAD_NAMES, command
from tests.command import Run

COMMANDS = (
    *("demo", "data", "embed", "train", "calibrate", "evaluate", "predict", "diagnose", "export"),
    *("figures", "report", "explore", "reproduce", "doctor"),
)


def test_the_heads_are_listed(dropmax: Run) -> None:
    assert tuple(package.HEADS) == HEAD_NAMES
    said = " ".join(dropmax("train", "--help").stdout.split()).replace("- ", "-")
    assert all(name in said for name in HEAD_NAMES)


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_have_no_type_and_lines_fit_80_columns(name: str, dropmax: Run) -> None:
    said = dropmax(name, "--help").stdout
    assert "<bool>" not in said
    assert max(map(len, said.splitlines())) <= 80


def test_help_imports_neither_torch_nor_numpy() -> None:
    code = f"""
import sys
from dropmax.cli import main
for name in {COMMANDS!r}:
    for arguments in (["--help"], [name, "--help"], ["--version"]):
        sys.argv = ["dropmax", *arguments]
        try: main()
        except SystemExit: pass
        slow = {{"torch", "numpy", "matplotlib", "PIL"}} & set(sys.modules)
        assert not slow, (arguments, slow)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)
    assert "dropmax 0." in done.stdout


@pytest.mark.parametrize(
    ("called", "expected"),
    [
        (".venv/bin/dropmax", ".venv/bin/dropmax evaluate 'my run'"),
        ("/somewhere/dropmax/__main__.py", "-m dropmax evaluate 'my run'"),
        ("pytest", "dropmax evaluate 'my run'"),
    ],
)
def test_commands_are_printed_as_the_tool_was_called(
    called: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [called, "train"])
    assert command("evaluate", "my run").endswith(expected)
