"""Where a number came from: the command, commit, seeds, versions and machine behind it."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any


def provenance(command: str | None = None, seeds: Sequence[int] = ()) -> dict[str, Any]:
    """Return what is needed to get the same number again; ``command`` is what was typed, ``sys.argv`` by default."""
    import torch

    return {
        "command": command or " ".join(["dropmax", *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seeds": list(seeds),
        "versions": versions(),
        "machine": {
            "system": platform.platform(),
            "processor": _processor(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a result."""
    packages = ("dropmax", "torch", "numpy", "safetensors", "pillow")
    return {"python": platform.python_version(), **{package: metadata.version(package) for package in packages}}


def commit() -> str | None:
    """Return the git commit of this source tree, with ``-dirty`` where it has changes; None outside a checkout."""
    here = Path(__file__).resolve()
    root = next((parent for parent in here.parents if (parent / ".git").exists()), None)
    # Installed into another project's checkout (a .venv inside a project, say), that commit would not be ours.
    if root is None or root / "src" / "dropmax" not in here.parents:
        return None
    try:
        head = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--", "src")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("-dirty" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
