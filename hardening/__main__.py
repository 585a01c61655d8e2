"""``python -m hardening [NAME ...] [--short] [--seed N] [--out DIR]``: try to break dropmax and count what happened."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from dropmax.errors import DropMaxError, InvalidValue, did_you_mean
from dropmax.workbench.files import check_place
from hardening.campaign import CAMPAIGNS, Outcome, check_replaceable, result_path, write_outcome


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run the command line; return 1 where a promise was broken, 2 for a mistake in the command."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    console = console or Console()
    parser = argparse.ArgumentParser(prog="python -m hardening", description="Try to break dropmax.")
    parser.add_argument("name", nargs="*", metavar="NAME", help=f"which: {', '.join(CAMPAIGNS)} (default: all)")
    parser.add_argument("--short", action="store_true", help="few cases, seconds not hours; says if it works")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("results/reliability"), metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        for name in options.name:
            if name not in CAMPAIGNS:
                raise InvalidValue(
                    f"unknown campaign {name!r}:{did_you_mean(name, CAMPAIGNS)} "
                    f"The campaigns are {', '.join(CAMPAIGNS)}"
                )
        chosen = list(dict.fromkeys(options.name)) or list(CAMPAIGNS)
        check_place(options.out)
        for name in chosen:  # all of them first: nobody should learn of an obstacle after hours
            check_replaceable(result_path(options.out, name, options.short), name)
        command = " ".join(["python -m hardening", *arguments])
        outcomes = {name: _run(name, command, options, console) for name in chosen}
    except DropMaxError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console.print(_table(outcomes))
    return 1 if any(outcome.failed for outcome in outcomes.values()) else 0


def _run(name: str, command: str, options: argparse.Namespace, console: Console) -> Outcome:
    console.print(f"{name}: {CAMPAIGNS[name]} ...", soft_wrap=True)
    module = importlib.import_module(f"hardening.{name}")
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dropmax-hardening-") as scratch:
        outcome: Outcome = module.run(short=options.short, seed=options.seed, scratch=Path(scratch))
    path = result_path(options.out, name, options.short)
    write_outcome(path, name, outcome, command, options.seed, time.monotonic() - start)
    for line in outcome.failures:
        console.print(f"  BROKEN {line}", soft_wrap=True, markup=False)
    console.print(f"  {outcome.tried:,} tried, {outcome.failed:,} broken. Kept in {path}", soft_wrap=True)
    return outcome


def _table(outcomes: dict[str, Outcome]) -> Table:
    table = Table("campaign", "promise", "tried", "broken", "what became of them")
    for name, outcome in outcomes.items():
        kinds = ", ".join(f"{kind} {number:,}" for kind, number in sorted(outcome.counts.items()))
        table.add_row(name, CAMPAIGNS[name], f"{outcome.tried:,}", f"{outcome.failed:,}", kinds)
    return table


if __name__ == "__main__":
    sys.exit(main())
