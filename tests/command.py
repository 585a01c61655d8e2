"""``dropmax ARGUMENTS``, through the entry point but inside this process: importing torch takes seconds; and ROUNDS."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

#: How long a slow campaign runs: ``DROPMAX_ROUNDS=100 pytest -m slow tests/slow`` does a hundred times the short form.
ROUNDS = int(os.environ.get("DROPMAX_ROUNDS", "1"))


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        """Say what rich and the progress lines ask."""
        return True


def dropmax(*arguments: object, cwd: Path | None = None, terminal: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the tool and return its exit code and what it printed; with ``terminal``, all of it to a pretended one."""
    from dropmax.cli import main

    out = _Terminal() if terminal else io.StringIO()
    err = out if terminal else io.StringIO()
    code: int | str | None = 0
    before = os.getcwd()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["dropmax", *map(str, arguments)])
        try:
            os.chdir(cwd or before)
            main()
        except SystemExit as stop:
            code = stop.code
        finally:
            os.chdir(before)
    return subprocess.CompletedProcess(arguments, int(code or 0), out.getvalue(), err.getvalue())
