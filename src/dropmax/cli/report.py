"""``dropmax report``."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from dropmax.cli.options import AsJson, DataDir, MovedData, Threads, TrustCode, use_threads
from dropmax.errors import RunError


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directories; several are compared. Or one --out of `dropmax reproduce`.")
    ],
    out: Annotated[Path, typer.Option(help="The new HTML file.")] = Path("report.html"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    data: MovedData = None,
    data_dir: DataDir = None,
    threads: Threads = 0,
    trust_code: TrustCode = False,
    as_json: AsJson = False,
) -> None:
    """Write what runs found into one HTML file: numbers, curves, calibration, confusions, the hardest examples."""
    if out.is_dir() or not out.parent.is_dir():
        wrong = f"{out} is a directory" if out.is_dir() else f"there is no directory {out.parent}"
        raise RunError(f"the report cannot be written: {wrong}; name a file in an existing directory with --out")
    if out.exists() and not force:
        raise RunError(f"{out} exists: choose another file with --out, or replace it with --force")
    from dropmax import metrics
    from dropmax.lab.figures.runs import load_runs
    from dropmax.lab.report import make_report
    from dropmax.workbench.files import write_atomically

    if any((run / "results.jsonl").exists() for run in runs):
        _report_study(runs, out, as_json)
        return
    use_threads(threads)
    loaded = load_runs(runs, data_dir, data=data, trust_code=trust_code)
    page = make_report(loaded, shlex.join(["dropmax", *sys.argv[1:]]))
    write_atomically(out, page)
    if as_json:
        found = [
            {"run": str(run.path), "method": run.label, "seed": run.seed, "data": run.recipe.data.name}
            | metrics.evaluate(run.outputs.probs, run.outputs.labels)
            for run in loaded
        ]
        print(json.dumps({"report": str(out), "runs": found}))
    else:
        print(f"The report is in {out} ({len(page.encode()) / 1e6:.1f} MB): open it in a browser.")


def _report_study(places: list[Path], out: Path, as_json: bool) -> None:
    """Write the page of a table or study."""
    from dropmax.lab.experiments import Store
    from dropmax.lab.experiments.compare import make_page
    from dropmax.workbench.files import write_atomically

    if len(places) > 1:
        raise RunError(f"a report covers one table or study, or runs: name {places[0]} alone")
    write_atomically(out, make_page(Store(places[0])))
    print(json.dumps({"report": str(out)}) if as_json else f"The report is in {out}: open it in a browser.")
