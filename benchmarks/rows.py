"""What the measurements outside ``python -m benchmarks`` share: JSON lines with provenance, runs, means and tables."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from dropmax.workbench.provenance import provenance
from dropmax.workbench.training import load_model


def parser(description: str | None, out: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with ``--out``, a file of JSON lines to which rows are appended."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = None if out is None else Path(out)
    made.add_argument("--out", type=Path, default=default, required=out is None, metavar="FILE")
    return made


def read(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, none where there is no file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def append(file: Path, row: Mapping[str, Any], seeds: Sequence[int] = (), command: str | None = None) -> None:
    """Append a row with its provenance, and print it without."""
    command = command or shlex.join([*_called(), *sys.argv[1:]])
    print(json.dumps(row), file=sys.stderr, flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps({**row, "provenance": provenance(command, seeds)}) + "\n")


def _called() -> list[str]:
    spec = sys.modules["__main__"].__spec__  # of `python -m benchmarks.NAME`
    return ["python", "-m", spec.name if spec else "benchmarks"]


def measure_runs(
    paths: Iterable[Path], file: Path, measure: Callable[[Path], list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Measure the trained runs that the file does not have yet, and return its rows."""
    done = {(row["data"], row["head"], row["seed"]) for row in read(file)}
    for path in paths:
        recipe = load_model(path).recipe
        name, head, seed = Path(recipe.data.name), recipe.head["name"], recipe.training.seed
        if (name.stem, head, seed) in done:
            continue
        how = {"mnist-1k": " --recipe released", "cifar-100-5k": " --recipe small"}.get(name.name, "")
        made = f"dropmax train {name.name}{how} --head {head} --seed {seed} --out RUN"
        for row in measure(path):
            about = {"data": name.stem, "head": head, "seed": seed}
            append(file, {**about, **row}, [seed], f"{made} && {' '.join(_called())} RUN")
    return read(file)


def mean_and_deviation(values: Sequence[float], digits: int) -> str:
    """Return the mean and, where there are two, the standard deviation over seeds; nothing of nothing."""
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}" if values else ""


def markdown(head: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    """Return a table of Markdown."""
    lines = [f"| {' | '.join(map(str, line))} |" for line in (head, *body)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
