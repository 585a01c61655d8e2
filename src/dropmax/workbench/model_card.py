"""The README of a published model: what it is, what was measured, what it confuses, how to use it and make it again.

Every number in a card was measured, by training or just now; where nothing was, the card says so.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dropmax import metrics
from dropmax.errors import DataError, MissingDependency
from dropmax.heads.masked import MaskedHead
from dropmax.workbench import style
from dropmax.workbench.data import Split
from dropmax.workbench.evaluation import Outputs, predict
from dropmax.workbench.terminal import printable, progress
from dropmax.workbench.training import RunDirectory, TrainedModel, load_data

#: Metrics in the card: their titles, and what they are multiplied by.
_COLUMNS = {
    "error": ("error %", 100),
    "top5_error": ("top-5 error %", 100),
    "nll": ("NLL", 1),
    "brier": ("Brier", 1),
    "ece": ("ECE %", 100),
    "aurc": ("AURC", 1),
}
_MOST_CLASSES = 30  # whose matrix can still be read


@dataclass
class Measured:
    """What is known about a model: rows of metrics, and what each class pays attention to."""

    rows: list[dict[str, Any]] = field(default_factory=list)  #: split, mode, examples, metrics
    attention: Tensor | None = None  #: (K, K), see :func:`draw_figure`
    environment: dict[str, Any] = field(default_factory=dict)  #: of the run that made the model
    missing: str = ""  #: why the test set was not measured


def measure(trained: TrainedModel, run: Path | None, data_dir: Path | str | None = None) -> Measured:
    """Collect the validation metrics a run logged, and measure the model on its test set, where that can be found."""
    found = Measured()
    if run is not None and (run / "recipe.toml").is_file():
        kept = RunDirectory(run).kept()
        if "validation" in kept:
            logged = {name: kept["validation"][name] for name in ("error", "nll", "ece")}
            found.rows.append({"split": "validation", "mode": "mean", "examples": None, **logged})
        found.environment = RunDirectory(run).environment()
    try:
        test = load_data(trained.recipe, data_dir, run=run).test
    except DataError as error:
        found.missing = str(error)
        return found
    if not len(test):
        found.missing = "the data set has no test split"
        return found
    modes: list[str | None] = ["mean", "exact"] if isinstance(trained.model.head, MaskedHead) else ["mean"]
    for mode in [*modes, None] if trained.calibration is not None else modes:
        outputs = _predict(trained, test, mode)
        scores = metrics.evaluate(outputs.probs, outputs.labels)
        name = mode or f"calibrated ({trained.calibration.mode if trained.calibration else ''})"
        found.rows.append({"split": "test", "mode": name, "examples": len(outputs.labels), **scores})
        if mode == "mean":
            found.attention = _mean_by_class(outputs.retain if _attends(trained) else outputs.probs, outputs.labels)
    return found


def _predict(trained: TrainedModel, split: Split, mode: str | None) -> Outputs:
    title = f"measuring on {len(split):,} test examples, mode {mode or 'calibrated'}"
    with progress(title, len(split), "examples") as advance:

        def counted() -> Any:
            for x, y in trained.batches(split):
                yield x, y
                advance(len(y))

        return predict(trained.model, counted(), mode=mode)


def _attends(trained: TrainedModel) -> bool:
    """Say whether the head has learned retain probabilities; a head without them is judged by its probabilities."""
    return "theta" in trained.model.head.maps


def _mean_by_class(values: Tensor, labels: Tensor) -> Tensor:
    """Return the mean row of each label, (K, K); NaN for a class without examples."""
    size = values.shape[-1]
    sums = torch.zeros(size, size).index_add_(0, labels, values.float())
    return sums / torch.bincount(labels, minlength=size)[:, None]


def draw_figure(path: Path, trained: TrainedModel, found: Measured) -> bool:
    """Draw the matrix of true class (row) and rival (column), or of many classes the most confused pairs.

    Returns False where nothing was measured or matplotlib is missing.
    """
    if found.attention is None:
        return False
    try:
        plt = style.pyplot()
    except MissingDependency:
        return False
    names = [style.plain(name) for name in trained.classes]
    meaning = _meaning(trained)
    if len(names) <= _MOST_CLASSES:
        side = 2.2 + 0.3 * len(names)
        figure, axes = plt.subplots(figsize=(side + 1.0, side))
        image = axes.imshow(found.attention.clone().fill_diagonal_(float("nan")).numpy(), cmap=style.MASKS)
        axes.set_facecolor("#DDDDDD")  # shows where there is no number: on the diagonal
        axes.set_xticks(range(len(names)), names, rotation=0 if max(map(len, names)) <= 2 else 90)
        axes.set_yticks(range(len(names)), names)
        axes.set(xlabel="rival", ylabel="true class")
        axes.grid(False)
        figure.colorbar(image, ax=axes, label=meaning, shrink=0.8)
    else:
        pairs = top_pairs(found.attention, 15)
        figure, axes = plt.subplots(figsize=(7, 0.6 + 0.3 * len(pairs)))
        axes.barh(range(len(pairs)), [value for *_, value in pairs], color=style.BLUE)
        axes.set_yticks(range(len(pairs)), [f"{names[i]} → {names[j]}" for i, j, _ in pairs])
        axes.invert_yaxis()
        axes.set(xlabel=meaning, title="true class → rival")
        axes.grid(False, axis="y")
    style.save(figure, path)
    return True


def top_pairs(attention: Tensor, count: int) -> list[tuple[int, int, float]]:
    """Return the pairs (true class, rival, value) of the largest values off the diagonal, largest first."""
    rivals = attention.clone().fill_diagonal_(float("nan")).nan_to_num(-1.0)
    values, places = rivals.flatten().topk(min(count, rivals.numel()))
    size = attention.shape[-1]
    return [(p // size, p % size, v) for p, v in zip(places.tolist(), values.tolist(), strict=True) if v >= 0]


def model_card(trained: TrainedModel, found: Measured, *, repository: str, figure: str | None) -> str:
    """Return the card as Markdown with the header model hubs read.

    ``repository`` is what to pass to ``from_pretrained``; ``figure`` is the name of the picture, without which there is
    a table of the most confused pairs.
    """
    recipe, head = trained.recipe, trained.model.head
    data = _harmless(Path(recipe.data.name).name)  # of the user's own data, not the path
    parts = [
        _header(trained, found, data),
        f"# {recipe.head['name']} on {data}",
        f"A `{recipe.network['name']}` with the head `{head!r}`, trained on `{data}` "
        f"({len(trained.classes)} classes) with dropmax.",
        "## What was measured",
        _metrics(found),
        "## What it may confuse",
        _confusion(trained, found, figure),
        "## How to use it",
        _usage(trained, repository),
        "## How it was made",
        _made(found),
        f"```toml\n{recipe.to_toml().strip()}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _header(trained: TrainedModel, found: Measured, data: str) -> str:
    """Return the YAML header; JSON is YAML, and needs no care about quoting."""
    task = "image-classification" if trained.is_images else "tabular-classification"
    head, network = trained.recipe.head["name"], trained.recipe.network["name"]
    tags = list(dict.fromkeys(["dropmax", head, network]))
    header: dict[str, Any] = {"library_name": "dropmax", "pipeline_tag": task, "tags": tags}
    results = []
    for row in found.rows:
        kind = f"({row['mode']} prediction)"
        scores = [{"type": name, "name": f"{name} {kind}", "value": row[name]} for name in _COLUMNS if name in row]
        dataset = {"name": data, "type": data, "split": row["split"]}
        results.append({"task": {"type": task}, "dataset": dataset, "metrics": scores})
    if results:
        header["model-index"] = [{"name": f"{head} on {data}", "results": results}]
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in header.items()), "---"])


def _metrics(found: Measured) -> str:
    if not found.rows:
        return f"Nothing was measured: {found.missing or 'this model came without the run that made it'}."
    columns = {name: how for name, how in _COLUMNS.items() if any(name in row for row in found.rows)}
    rows = [["split", "prediction", "examples", *(title for title, _ in columns.values())]]
    for row in found.rows:
        shown = [f"{factor * row[name]:.4g}" if name in row else "" for name, (_, factor) in columns.items()]
        rows.append([row["split"], row["mode"], "" if row["examples"] is None else f"{row['examples']:,}", *shown])
    text = _table(rows)
    if any(row["split"] == "validation" for row in found.rows):
        text += "\n\nThe validation row is that of the last epoch of training."
    if found.missing:
        text += f"\n\nThe test set was not measured: {found.missing}."
    return text


def _meaning(trained: TrainedModel) -> str:
    return "mean retain probability ρ of the rival" if _attends(trained) else "mean predicted probability of the rival"


def _confusion(trained: TrainedModel, found: Measured, figure: str | None) -> str:
    if found.attention is None:
        return "Not measured, as there was no test set at hand."
    over = f"For the test examples of each class, the {_meaning(trained)}"
    if figure is not None:
        return f"{over}.\n\n![Which classes are confused with which]({figure})"
    names = [_harmless(name) for name in trained.classes]
    rows = [[names[i], names[j], f"{value:.3f}"] for i, j, value in top_pairs(found.attention, 10)]
    return f"{over}; the ten largest.\n\n" + _table([["true class", "rival", "value"], *rows])


def _table(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _harmless(name: str) -> str:
    """Return an untrusted name as one line of Markdown that is nothing but text."""
    shown = html.escape(printable(" ".join(name.split())), quote=False)
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", shown) if re.search(r"[`\[\]|<&]", shown) else shown


def _usage(trained: TrainedModel, repository: str) -> str:
    shape = (1, *trained.input_shape)
    inputs = f"torch.zeros({shape})  # your features, as they are"
    if trained.is_images:
        inputs = f"torch.zeros({shape}, dtype=torch.uint8)  # your images, pixels 0 to 255"
    return f"""```python
import torch
from dropmax.workbench.hub import from_pretrained

trained = from_pretrained({repository!r})
inputs = {inputs}
with torch.no_grad():
    found = trained.answer(inputs)
print(found.probs, found.verdicts()[0].words(trained.classes))  # how sure it is, and what else it could be
```

Image files and tables: `dropmax predict DIRECTORY FILE...`, where DIRECTORY holds `model.safetensors`."""


def _made(found: Measured) -> str:
    if not found.environment:
        return "The run that made it was not kept with the model; its recipe was:"
    about = found.environment
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    lines = [
        f"- command: `{about.get('command')}`",
        f"- commit of dropmax: `{about.get('commit') or 'not recorded'}`",
        f"- date: {about.get('date')}",
        f"- versions: {versions}",
    ]
    return "\n".join(lines) + "\n\nThe recipe; `dropmax train --recipe recipe.toml` trains it again:"
