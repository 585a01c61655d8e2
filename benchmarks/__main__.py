"""``python -m benchmarks [NAME ...] [--quick] [--out DIR]``: run benchmarks, print tables, keep the results.

A benchmark is a module ``bench_NAME.py`` in this directory with ``run() -> list[dict]``. It may take ``quick``, and it
may have ``tables(rows)`` and ``plot(rows, path)``. Rows with ``what``, ``ratio``, ``aim`` and ``met`` need no tables.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import harness
from benchmarks.bench_scale import aims_table
from dropmax.errors import DropMaxError, InvalidValue, did_you_mean
from dropmax.workbench.files import check_place

SEED = 0
_PREFIX = "bench_"


def names() -> list[str]:
    """Return the benchmarks there are."""
    return sorted(path.stem.removeprefix(_PREFIX) for path in Path(__file__).parent.glob(f"{_PREFIX}*.py"))


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run the command line and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    console = console or Console()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure what dropmax costs.")
    parser.add_argument("name", nargs="*", metavar="NAME", help=f"which to run: {', '.join(names())} (default: all)")
    parser.add_argument("--quick", action="store_true", help="small sizes, seconds not minutes; says if it works")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), metavar="DIR", help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        for name in options.name:
            if name not in names():
                raise InvalidValue(
                    f"unknown benchmark {name!r}:{did_you_mean(name, names())} The benchmarks are {', '.join(names())}"
                )
        chosen = list(dict.fromkeys(options.name)) or names()
        check_place(options.out)
        for name in chosen:  # all of them first: nobody should learn of an obstacle after minutes of measuring
            harness.check_replaceable(harness.result_path(options.out, name, options.quick), name)
        for name in chosen:
            _run(name, " ".join(["python -m benchmarks", *arguments]), options.quick, options.out, console)
    except DropMaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _run(name: str, command: str, quick: bool, out: Path, console: Console) -> None:
    module = importlib.import_module(f"benchmarks.{_PREFIX}{name}")
    torch.manual_seed(SEED)
    origin = harness.origin(command, [SEED])
    if "quick" in inspect.signature(module.run).parameters:
        rows = module.run(quick=quick)
    else:
        if quick:
            console.print(f"The benchmark {name} has no quick form: all of it runs.")
        rows = module.run()
    for table in module.tables(rows) if hasattr(module, "tables") else [_table(name, rows)]:
        console.print(table)
    path = harness.result_path(out, name, quick)
    harness.write_result(path, name, rows, origin, quick)
    if hasattr(module, "plot"):
        module.plot(rows, path.with_suffix(".png"))
    machine, load = origin["machine"], origin["load_average"]
    threads = f"{machine['threads']} thread{'s' if machine['threads'] > 1 else ''}"
    console.print(f"{machine['processor']}, {threads}. Kept in {path}", soft_wrap=True)
    if load is not None and load[0] + machine["threads"] > machine["cores"] + 0.5:
        # Threads wait for one another: when one of them has to wait for a core, a step of 0.3 ms can take 30.
        console.print(
            f"The machine was busy before this began (load {load[0]:.1f} on {machine['cores']} cores): trust the "
            "intervals rather than the medians, and run it again when the machine is quiet.",
            soft_wrap=True,
        )


def _table(name: str, rows: list[dict[str, Any]]) -> Table:
    return aims_table(name, rows) if "what" in rows[0] else harness.table_of(name, rows)


if __name__ == "__main__":
    sys.exit(main())
