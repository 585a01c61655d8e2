"""``dropmax predict``."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dropmax.cli import options
from dropmax.cli.options import check_mode, grid, tell, use_threads
from dropmax.errors import InvalidValue, RunError, check_choice
from dropmax.workbench.terminal import console, printable

if TYPE_CHECKING:
    from dropmax.workbench.evaluation import Outputs
    from dropmax.workbench.training import TrainedModel

#: How many rivals an answer names at most.
RIVALS = 5


def predict(
    run: Annotated[Path, typer.Argument(help="A run directory, or a model.safetensors.")],
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Images, folders of images, tables (.npz, .csv, .parquet), or, for a model of texts, sentences."
        ),
    ],
    form: Annotated[str, typer.Option("--format", help="table, csv or json.", metavar="NAME")] = "table",
    out: Annotated[
        Path | None, typer.Option(help="Write to this new file instead of the screen.", metavar="FILE")
    ] = None,
    top: Annotated[int, typer.Option(help="How many classes to name, likeliest first.", min=1, metavar="N")] = 1,
    all_probabilities: Annotated[
        bool, typer.Option("--all-probabilities", help="Add the probability of every class (csv and json).")
    ] = False,
    coverage: Annotated[
        float | None,
        typer.Option(
            help="How often the set of what it could be must hold the truth, such as 0.95; needs a calibrated run.",
            show_default=False,
            metavar="SHARE",
        ),
    ] = None,
    mode: options.Mode = None,
    samples: options.Samples = 100,
    seed: Annotated[int, typer.Option(help="Seed of the masks in mode mc.", metavar="N")] = 0,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="For a model of MNIST's digits: do not prepare photographs as MNIST was.")
    ] = False,
    label_column: options.LabelColumn = None,
    id_column: options.IdColumn = None,
    device: options.Device = None,
    threads: options.Threads = 0,
    trust_code: options.TrustCode = False,
) -> None:
    """Say what things are, how sure that is, and what they may be confused with.

    Columns of tables are matched by name; a label column and columns the model was not trained on are ignored.
    """
    check_choice("format", form, ("table", "csv", "json"))
    from dropmax.checks import check_probability

    check_mode(mode)
    if coverage is not None:
        check_probability("coverage", coverage)
        if mode is not None:
            raise InvalidValue(f"--coverage is promised for the calibrated answer: leave out --mode {mode}")
    if all_probabilities and form == "table":
        raise InvalidValue("--all-probabilities needs --format csv or --format json: a table has no room for them")
    if out is not None and out.exists():
        raise RunError(f"{out} exists: choose another file with --out, or delete it first")
    if out is not None and not out.parent.is_dir():
        raise RunError(f"{out} cannot be written: there is no directory {out.parent}")
    import torch

    from dropmax.workbench.data.unlabelled import Unlike, find_inputs, is_sentence, read_inputs
    from dropmax.workbench.terminal import progress
    from dropmax.workbench.training import load_model

    use_threads(threads)
    trained = load_model(run, device=device or "cpu", trust_code=trust_code)
    if coverage is not None:
        if trained.calibration is None:
            raise RunError(
                f"{run} has not been calibrated, so no coverage can be promised: run `dropmax calibrate {run}`, with "
                "labelled rows that did not train it if it held none out"
            )
        for note in trained.calibration.notes(coverage):  # too few rows are refused here, before the work
            tell(note)
    expected = trained.expected
    texts = [str(given) for given in files if expected.text_column and is_sentence(given)]
    if expected.text_column and any(os.path.isdir(given) for given in files):  # "" is the current directory
        raise InvalidValue("a model of sentences takes sentences that are not empty, or tables; it was given a folder")
    chosen = find_inputs([given for given in files if str(given) not in texts])
    columns: dict[str, Any] = {"label_column": label_column, "id_column": id_column}
    expected = dataclasses.replace(expected, **{key: value for key, value in columns.items() if value})
    if as_is:
        expected = dataclasses.replace(expected, digits=False)
    generator = torch.Generator().manual_seed(seed)
    rows: list[dict[str, Any]] = []
    unlike = Unlike(trained.brightness, trained.mean, trained.std)
    with progress("predicting", len(chosen), "files") as advance:
        for names, inputs in read_inputs(chosen, expected, tell, texts):
            unlike.look(inputs)
            outputs = trained.answer(inputs, mode=mode, samples=samples, generator=generator, std=mode == "exact")
            rows += _rows(names, outputs, trained, top=top, coverage=coverage, all_probabilities=all_probabilities)
            advance(len(names))
    if unlike.warning:
        tell(f"warning: {unlike.warning}")
    if out is None and sys.stdout.isatty():
        rows = _shown(rows)  # a script gets names as they are; a person's terminal must not obey what is in them
    if form == "table":
        text = _table(rows, _could_be(trained, mode, coverage))
    elif form == "csv":
        text = _csv(rows, trained.classes)
    else:
        text = json.dumps(rows, indent=2, ensure_ascii=False) + "\n"
    if out is None:
        sys.stdout.write(text)
    else:
        from dropmax.workbench.files import write_atomically

        write_atomically(out, text)
        tell(f"{len(rows):,} predictions are in {out}")


def _rows(
    names: Sequence[str],
    outputs: Outputs,
    trained: TrainedModel,
    *,
    top: int,
    coverage: float | None,
    all_probabilities: bool,
) -> Iterator[dict[str, Any]]:
    classes, verdicts, best = trained.classes, outputs.verdicts(coverage), outputs.top(top)
    for i, name in enumerate(names):
        # names of files need not be text
        row: dict[str, Any] = {"input": os.fsencode(name).decode(errors="backslashreplace")}
        for rank, k in enumerate(best.indices[i].tolist(), 1):
            row[f"class_{rank}"] = classes[k]
            row[f"probability_{rank}"] = round(float(outputs.probs[i, k]), 6)
            if outputs.std is not None:
                row[f"std_{rank}"] = round(float(outputs.std[i, k]), 6)
        row["state"] = verdicts[i].state
        numbers = ((k, float(outputs.probs[i, k]), float(outputs.retain[i, k])) for k in verdicts[i].classes)
        row["set"] = [{"class": classes[k], "probability": round(p, 6), "retain": round(r, 4)} for k, p, r in numbers]
        row["confusable"] = [{key: member[key] for key in ("class", "retain")} for member in row["set"][1:]]
        if all_probabilities:
            row["probabilities"] = dict(zip(classes, (round(p, 6) for p in outputs.probs[i].tolist()), strict=True))
        yield row


def _shown(value: Any) -> Any:
    if isinstance(value, dict):
        return {_shown(key): _shown(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return printable(value) if isinstance(value, str) else value


def _could_be(trained: TrainedModel, mode: str | None, coverage: float | None) -> str:
    """Return the title of the column of sets: what they promise."""
    calibration = trained.calibration if mode is None else None
    if calibration is None or (coverage or calibration.coverage) is None:
        return "could be (not calibrated)"
    return f"could be ({100 * (coverage or calibration.coverage or 0):g} % coverage)"


def _in_words(row: dict[str, Any]) -> str:
    """Return what an input could be, with the retain probability of each class as the reason."""
    from dropmax.workbench.evaluation import Verdict

    if row["state"] == "sure":
        return "sure"
    learned = any(member["retain"] != 1 for member in row["set"])
    names = [member["class"] + (f" (ρ {member['retain']:.2f})" if learned else "") for member in row["set"]]
    return Verdict(row["state"], tuple(range(len(names)))).words(names, RIVALS)


def _table(rows: list[dict[str, Any]], could_be: str) -> str:
    from rich.text import Text

    ranks = range(1, 1 + sum(key.startswith("class_") for key in rows[0]))
    numbered = [""] if len(ranks) == 1 else [f" {rank}" for rank in ranks]
    titles = [f"{what}{rank}" for rank in numbered for what in ("class", "probability")]
    table = grid("input", *titles, could_be, right=titles[1::2])
    for row in rows:
        cells = [row["input"]]
        for rank in ranks:
            deviation = f" ± {row[f'std_{rank}']:.4f}" if f"std_{rank}" in row else ""
            cells += [row[f"class_{rank}"], f"{row[f'probability_{rank}']:.4f}{deviation}"]
        cells.append(_in_words(row))
        table.add_row(*(Text(printable(cell)) for cell in cells))
    buffer = io.StringIO()
    console(buffer, is_terminal=sys.stdout.isatty()).print(table)
    return "".join(line.rstrip() + "\n" for line in buffer.getvalue().splitlines())


def _csv(rows: list[dict[str, Any]], classes: Sequence[str]) -> str:
    """Write one column per value: rank by rank, the state, the set's size and first rivals, then all classes."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    plain = [key for key in rows[0] if key not in ("confusable", "set", "probabilities")]
    rivals = min(RIVALS, len(classes) - 1)
    header = [*plain, "set_size"]
    header += [f"{what}_{rank}" for rank in range(1, rivals + 1) for what in ("confusable", "retain")]
    writer.writerow(header + [f"p_{name}" for name in rows[0].get("probabilities", ())])
    for row in rows:
        cells = [*(row[key] for key in plain), len(row["set"])]
        for rival in row["confusable"][:rivals]:
            cells += [rival["class"], rival["retain"]]
        cells += [""] * (len(header) - len(cells))
        writer.writerow(cells + list(row.get("probabilities", {}).values()))
    return buffer.getvalue()
