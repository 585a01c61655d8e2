"""The report itself: sections of HTML, from top to bottom."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from dropmax import metrics
from dropmax.errors import InvalidValue
from dropmax.lab.figures.reliability import pooled
from dropmax.lab.figures.runs import Run, data_name
from dropmax.lab.report.compare import LEVEL, Comparison, compare
from dropmax.lab.report.examples import confusion_section, hardest_section
from dropmax.lab.report.html import escape, name, table
from dropmax.lab.report.svg import Series, line_chart, reliability
from dropmax.lab.report.words import METRICS
from dropmax.workbench.evaluation import answer
from dropmax.workbench.provenance import commit, versions

__all__ = ["make_report"]

#: Nothing may be fetched or executed, whatever a class is called: the browser enforces it.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def make_report(runs: Sequence[Run], command: str) -> str:
    """Return a report on runs as one HTML page that needs nothing else.

    Args:
        runs: from :func:`dropmax.lab.figures.runs.load_runs`; several are compared, data set by data set.
        command: what made it, to be told at its end.
    """
    if not runs:
        raise InvalidValue("name at least one run to report on")
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.recipe.data.name, []).append(run)
    names = list(dict.fromkeys(data_name(run.recipe) for run in runs))
    heads = list(dict.fromkeys(run.head.name for run in runs))
    title = f"{', '.join(heads)} on {', '.join(names)}"
    parts = [f"<h1>{escape(title)}</h1>"]
    for members in groups.values():
        if len(groups) > 1:
            parts.append(f"<h1>{name(data_name(members[0].recipe))}</h1>")
        parts += _sections(members)
    parts += _repeat_section(runs, command)
    style = resources.files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _sections(runs: Sequence[Run]) -> Iterator[str]:
    found = compare(runs)
    yield _lead(runs, found)
    yield from _trained_section(found)
    yield from _numbers_section(runs, found)
    yield from _curves_section(found)
    yield from _calibration_section(found)
    main = next((run for run in runs if run.has_masks), runs[0])
    yield from confusion_section(main, several=len(runs) > 1)
    yield from hardest_section(main, several=len(runs) > 1)


def _lead(runs: Sequence[Run], found: Comparison) -> str:
    """Say the result in a sentence."""
    error = METRICS["error"]
    said = []
    for method in found.methods:
        cell = found.cells[method, "error"]
        count = f" over {len(cell.values)} seeds" if len(cell.values) > 1 else ""
        said.append(f"{escape(method)} is wrong on {error.show(cell.mean or 0.0, cell.half_width)}{count}")
    examples = len(runs[0].test)
    return f'<p class="lead">Of {examples:,} test examples of {name(data_name(runs[0].recipe))}, {"; ".join(said)}.</p>'


def _trained_section(found: Comparison) -> Iterator[str]:
    yield "<h2>What was trained on what</h2>"
    first = next(iter(found.methods.values()))[0]
    data = first.data
    kind = " × ".join(map(str, data.input_shape))
    yield (
        f"<p>{name(data_name(first.recipe))}: {len(data.train):,} training, {len(data.validation):,} validation and "
        f"{len(data.test):,} test examples of {data.num_classes} classes; each is "
        f"{f'an image of shape {kind}' if data.is_images else f'a row of {kind} features'}.</p>"
    )
    for note in data.notes:
        yield f'<p class="note">{escape(note)}</p>'
    rows = []
    for method, runs in found.methods.items():
        recipe = runs[0].recipe
        t = recipe.training
        network = _options(recipe.network)
        weights = sum(p.numel() for p in runs[0].model.parameters())
        rows.append(
            [
                escape(method),
                escape(network) + f"<br>{weights:,} weights",
                escape(_options(recipe.head)),
                f"{t.epochs} epochs, batches of {t.batch_size}, {escape(t.optimizer)} from {t.learning_rate:g}, "
                f"weight decay {t.weight_decay:g}",
                escape(", ".join(str(run.seed) for run in runs)),
            ]
        )
    yield table(["method", "network", "head", "training", "seeds"], rows)


def _options(values: dict[str, object]) -> str:
    others = ", ".join(f"{key} = {value}" for key, value in values.items() if key != "name")
    return f"{values['name']}{f' ({others})' if others else ''}"


def _numbers_section(runs: Sequence[Run], found: Comparison) -> Iterator[str]:
    yield "<h2>The numbers</h2>"
    if len(found.methods) == 1 and len(runs) == 1:
        yield from _one_run(runs[0])
        return
    rows = []
    for method in found.methods:
        cells = [found.cells[method, metric] for metric in found.metrics]
        shown = []
        for metric, cell in zip(found.metrics, cells, strict=True):
            text = METRICS[metric].show(cell.mean or 0.0, cell.half_width)
            text = f'<span class="best">{text}</span>' if cell.best else text
            shown.append(text + (" †" if cell.tied else ""))
        rows.append([escape(method), f"{len(cells[0].values)}", *shown])
    columns = ["method", "runs", *(METRICS[metric].label for metric in found.metrics)]
    yield table(columns, rows, numbers=range(1, len(columns)))
    alone = [method for method in found.methods if len(found.cells[method, "error"].values) == 1]
    yield (
        '<p class="note">Means over seeds, and where there are two or more their 95 % t-intervals. Less is better in '
        "every column; bold is the lowest mean. † marks what a paired t test over the seeds cannot tell from it "
        f"(p &gt; {LEVEL:g} after Holm's correction).</p>"
    )
    if alone:
        words = f"No interval for {', '.join(alone)}: one run. Give runs of other seeds for one."
        yield f'<p class="note">{escape(words)}</p>'
    for note in found.notes:
        yield f'<p class="note">{escape(note)}</p>'
    if len(found.methods) > 1:
        yield from _differences(found)
    yield _meanings(found.metrics)


def _differences(found: Comparison) -> Iterator[str]:
    yield f"<h3>Compared with {escape(found.baseline)}</h3>"
    rows = []
    unpaired = False
    for method in found.methods:
        if method == found.baseline:
            continue
        cells = []
        for metric in found.metrics:
            one = found.differences[method, metric]
            half = one.paired.half_width if one.paired else None
            unpaired |= one.paired is None
            p = f'<br><span class="soft">p = {one.p_value:.2g}</span>' if one.p_value is not None else ""
            cells.append(METRICS[metric].show_difference(one.mean, half) + p)
        rows.append([escape(method), *cells])
    columns = ["method", *(METRICS[metric].label for metric in found.metrics)]
    yield table(columns, rows, numbers=range(1, len(columns)))
    note = f"Method minus {escape(found.baseline)}: below zero is better. "
    note += "Runs of the same seed are compared in pairs, with 95 % t-intervals; p-values have Holm's correction."
    if unpaired:
        note += " Where fewer than two seeds pair there is no interval: read such a difference as an anecdote."
    yield f'<p class="note">{note}</p>'


def _one_run(run: Run) -> Iterator[str]:
    values = {"mean": metrics.evaluate(run.outputs.probs, run.outputs.labels)}
    if run.has_masks:
        values["exact"] = metrics.evaluate(answer(run.head, run.features(), mode="exact").probs, run.outputs.labels)
    rows = [
        [METRICS[m].label, *(METRICS[m].show(found[m]) for found in values.values()), escape(METRICS[m].meaning)]
        for m in values["mean"]
    ]
    heads = ["", "ρ for the masks", "summed over masks", ""] if run.has_masks else ["", "value", ""]
    yield table(heads, rows, numbers=range(1, 1 + len(values)))
    if run.has_masks:
        yield (
            '<p class="note">Two ways to predict: with the retain probabilities ρ in place of the masks (equation 15 '
            "of the paper, which is fast and what its tables show), and the exact sum over all masks.</p>"
        )
    yield '<p class="note">One run: no interval. Runs of other seeds on the same command line give one.</p>'


def _meanings(names: Sequence[str]) -> str:
    return table(["", "what it means"], [[METRICS[m].label, escape(METRICS[m].meaning)] for m in names])


def _curves_section(found: Comparison) -> Iterator[str]:
    charts = []
    for title, unit, part, key, factor in (
        ("Validation error", "%", "validation", "error", 100.0),
        ("Validation NLL", "nats", "validation", "nll", 1.0),
        ("Training loss: cross entropy", "nats", "train", "cross_entropy", 1.0),
        ("ρ of the truth, and (pale) of its rivals", "probability", "masks", "retain_target", 1.0),
    ):
        series = []
        for method, runs in found.methods.items():
            for run in runs:
                if part == "masks" and not run.has_masks:
                    continue
                rows = [row for row in run.log if part in row]
                series.append(
                    Series(method, [(row["epoch"], factor * row[part][key]) for row in rows], found.looks[method])
                )
                if part == "masks":
                    rivals = [(row["epoch"], row[part]["retain_rivals"]) for row in rows]
                    series.append(Series(method, rivals, found.looks[method], pale=True))
        charts.append(line_chart(series, title=title, x="epoch", y=unit, log=key == "cross_entropy"))
    if any(charts):
        yield "<h2>How it learned</h2>"
        yield f'<div class="row">{"".join(charts)}</div>'
        yield (
            '<p class="note">From the logs, a line a run. A validation curve that rises while training goes on falling '
            "is overfitting. The training loss of a head with masks is measured with its random masks, which is why it "
            "is rougher.</p>"
        )


def _calibration_section(found: Comparison) -> Iterator[str]:
    yield "<h2>Whether its confidence can be believed</h2>"
    charts, series = [], []
    for method, runs in list(found.methods.items())[:12]:
        probs, labels = pooled(runs)
        note = f"ECE {METRICS['ece'].show(metrics.ece(probs, labels))}"
        charts.append(reliability(metrics.reliability_bins(probs, labels), title=method, note=note))
        for run in runs:
            coverage, accuracy = metrics.accuracy_rejection_curve(run.outputs.probs, run.outputs.labels)
            step = max(1, len(coverage) // 200)
            kept = [(100 * (1 - c), 100 * a) for c, a in zip(coverage.tolist(), accuracy.tolist(), strict=True)]
            kept = kept[len(kept) // 2 :][::-1]
            series.append(Series(method, kept[::step], found.looks[method]))
    yield f'<div class="row">{"".join(charts)}</div>'
    yield (
        '<p class="note">Blue: how often answers of a confidence are right; red outline: how far that is from the '
        "confidence itself; below: the share of examples in each bin. On the dashed line a model is right exactly as "
        "often as it says.</p>"
    )
    title = "Accuracy when the least sure are rejected"
    yield f'<div class="row">{line_chart(series, title=title, x="rejected (%)", y="accuracy (%)")}</div>'
    yield '<p class="note">How accurate the rest is when the least confident answers go to somebody else.</p>'


def _repeat_section(runs: Sequence[Run], command: str) -> Iterator[str]:
    yield "<h2>How to repeat it</h2>"
    rows = []
    for run in runs:
        origin = run.environment
        recipe = Path(run.path) / "recipe.toml"
        used = origin.get("versions", {})
        shown = ", ".join(f"{k} {v}" for k, v in used.items()) if isinstance(used, dict) else str(used)
        machine = origin.get("machine", {})
        processor = machine.get("processor", "unknown") if isinstance(machine, dict) else "unknown"
        made = str(origin.get("commit") or "unknown")[:12]
        again = shlex.join(["dropmax", "train", "--recipe", str(recipe), "--out", "ANOTHER"])
        rows.append(
            [
                name(str(run.path), 60),
                f"<code>{escape(origin.get('command', 'unknown'))}</code>",
                f"<code>{escape(again)}</code>",
                f"<code>{escape(made)}</code>, {escape(origin.get('date', ''))}<br>"
                f'<span class="soft">{escape(shown)}; {escape(processor)}</span>',
            ]
        )
    yield table(["run", "trained by", "again, to the byte on such a machine", "commit and versions"], rows)
    now = ", ".join(f"{k} {v}" for k, v in versions().items())
    yield (
        f"<p>This report: <code>{escape(command)}</code> "
        f'<span class="soft">(commit {escape((commit() or "unknown")[:12])}; {escape(now)})</span></p>'
    )
    seen: dict[str, Run] = {}
    for run in runs:
        seen.setdefault(f"{data_name(run.recipe)}: {run.label}", run)
    for title, run in seen.items():
        yield f"<h3>Recipe of {escape(title)}, seed {run.seed}</h3><pre>{escape(run.recipe.to_toml())}</pre>"
