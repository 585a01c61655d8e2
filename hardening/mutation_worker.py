"""A process that judges mutants: one line of JSON in, one out.

It has torch, pytest and what the tests import, but nothing of dropmax: importing those takes seconds, a fork does not.
Each mutant gets a fork, in which the mutated source stands in for its module, and pytest runs until the first failure.
"""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ["OMP_NUM_THREADS"] = "1"

import contextlib
import importlib.machinery
import importlib.util
import json
import math
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

#: Waiting for this many times the seconds of work it may take, a mutant is killed all the same.
WAITS = 20

#: What importing the tests would import.
WARM = (
    "_pytest.doctest",
    "hypothesis.strategies",
    "mpmath",
    "pytest",
    "scipy.special",
    "scipy.stats",
    "torch._dynamo",
    "torch._higher_order_ops.while_loop",
    "torch.export",
)


def warm_up() -> None:
    """Import what the tests will want."""
    for name in WARM:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)


class Mutated(importlib.machinery.SourceFileLoader):
    """Loads a module from another source than its file's."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self.mutated = source

    def get_code(self, fullname: str) -> CodeType:
        """Compile the mutated source, past every cache."""
        return compile(self.mutated, self.path, "exec", dont_inherit=True)


class Finder:
    """Finds one module in its mutated form, and none else."""

    def __init__(self, name: str, path: str, source: str) -> None:
        self.name, self.path, self.source = name, path, source

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Answer for the mutated module only."""
        if name != self.name:
            return None
        inside = [str(Path(self.path).parent)] if self.path.endswith("__init__.py") else None
        loader = Mutated(name, self.path, self.source)
        return importlib.util.spec_from_file_location(name, self.path, loader=loader, submodule_search_locations=inside)


def judge(job: dict[str, Any]) -> dict[str, Any]:
    """Fork, run the tests on a mutant; return pytest's exit code, None where time ran out, and the seconds of work."""
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_the_child(job)
    in_time = True
    while True:
        done, status, used = os.wait4(child, os.WNOHANG if in_time else 0)
        if done:
            break
        if time.monotonic() - start > WAITS * job["seconds"]:
            in_time = False
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.02)
    code = os.waitstatus_to_exitcode(status)
    in_time &= code not in (-signal.SIGXCPU, -signal.SIGKILL)
    return {"exit": code if in_time else None, "seconds": round(used.ru_utime + used.ru_stime, 2)}


def _be_the_child(job: dict[str, Any]) -> None:
    code = 99
    try:
        os.setsid()  # so that processes the tests start end with it
        limit = math.ceil(job["seconds"])
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))  # seconds of work: the machine may be busy
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w")
        if job["module"]:
            sys.meta_path.insert(0, Finder(job["module"], job["path"], job["source"]))
        import hypothesis
        import pytest

        hypothesis.settings.register_profile("mutants", deadline=None, derandomize=True, max_examples=job["examples"])
        options = ["-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
        options.append("--hypothesis-profile=mutants")
        code = int(pytest.main([*options, *job["tests"]]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    """Answer until the input ends."""
    warm_up()
    if any(name.split(".")[0] == "dropmax" for name in sys.modules):
        raise RuntimeError("dropmax was imported before the first mutant")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(judge(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
