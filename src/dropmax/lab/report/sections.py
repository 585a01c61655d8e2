"""What a report shows: charts, confusions, per-class numbers, disagreements between runs, hard examples."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup, escape
from torch import Tensor

from dropmax.lab.figures import confusion_graph
from dropmax.lab.figures.demo import contrast, surest_mistakes
from dropmax.lab.figures.runs import NotDrawable, Run, Subject, picture
from dropmax.lab.images import Originals
from dropmax.workbench import style
from dropmax.workbench.evaluation import answer, confusions
from dropmax.workbench.training.rundir import data_place

__all__ = ["chart", "classes_section", "disagreements", "hardest", "hardest_section", "inline"]

HARDEST, PAIRS, SHOWN = 20, 6, 6
PHOTO = 112  # pixels: the longest side of a picture
#: With more classes than these, a profile shows only those that matter, and the matrix becomes a picture.
_ALL_CLASSES, _MATRIX = 12, 20
_SHOWN_CLASSES = 40  # rows of the table of classes
#: Colours of the figures, and the variables of report.css that stand for them.
_VARIABLES = {
    "#000000": "--ink",
    "#ffffff": "--ground",
    "#b0b0b0": "--soft",
    "#999999": "--soft",
    style.GREY.lower(): "--soft",
    style.BLUE.lower(): "--blue",
    style.ORANGE.lower(): "--orange",
    style.TRUTH.lower(): "--green",
    style.RED.lower(): "--red",
}


def chart(draw: Callable[[Subject], tuple[Any, str]], subject: Subject, label: str) -> Markup | None:
    """Return one of the figures of :mod:`dropmax.lab.figures` as SVG, or None where it has nothing to show."""
    try:
        figure, _ = draw(subject)
    except NotDrawable:
        return None
    return inline(figure, label)


def inline(figure: Any, label: str) -> Markup:
    """Return a matplotlib figure as an ``<svg>`` element and close it. Text stays text."""
    plt = style.pyplot()
    with plt.rc_context({"svg.fonttype": "none"}):
        text = style.encode(figure, "svg", transparent=True).decode()
    plt.close(figure)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href=", "href=")
    text = re.sub(r' id="[a-zA-Z]+[\w.]*_\d+"', "", text)  # figure_1, axes_1: once per picture, so not unique here
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(f": {colour}", f": var({variable})")
    return Markup(text.replace("<svg ", f'<svg class="chart" role="img" aria-label="{escape(label)}" ', 1))


def _confusion_image(counts: Any) -> Markup:
    """Return the confusion matrix of many classes as a picture: share of each true class, darker is more."""
    figure, axes = style.pyplot().subplots(figsize=(5.2, 4.6))
    share = counts / counts.sum(-1, keepdims=True).clip(1)
    image = axes.imshow(share, cmap=style.MASKS, vmin=0, vmax=1, interpolation="nearest")
    axes.set(xlabel="answer (number of the class)", ylabel="true class")
    axes.grid(False)
    figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
    return inline(figure, f"Confusion matrix of {len(counts)} classes")


def classes_section(run: Run) -> dict[str, Any]:
    """Return confusion matrix, per-class table and most confused pairs of one run."""
    outputs, count = run.outputs, len(run.classes)
    counts = confusions(outputs.labels, outputs.predicted, count).numpy()
    found: dict[str, Any] = {"counts": None, "image": None, "graph": None}
    if count <= _MATRIX:
        found["counts"] = counts.tolist()
    else:
        found["image"] = _confusion_image(counts)
    if run.has_masks and confusion_graph.links(outputs):
        found["graph"] = chart(confusion_graph.draw, Subject([run]), "Which classes the model may confuse")
    return {**found, **_class_rows(run, counts), "pairs": _pairs(run, counts)}


def _class_rows(run: Run, counts: Any) -> dict[str, Any]:
    sets, note = _sets(run)
    rows: list[dict[str, Any]] = []
    for k, name in enumerate(run.classes):
        mine, said, hit = int(counts[k].sum()), int(counts[:, k].sum()), int(counts[k, k])
        chosen = run.outputs.labels == k
        row = dict.fromkeys(("error", "recall", "coverage", "size")) | {"name": name, "examples": mine}
        row["precision"] = hit / said if said else None
        if mine:
            row |= {"error": 1 - hit / mine, "recall": hit / mine}
        if mine and sets is not None:
            held, size = sets[chosen][:, k], sets[chosen].sum(-1)
            row |= {"coverage": float(held.double().mean()), "size": float(size.double().mean())}
        rows.append(row)
    rows.sort(key=lambda row: -(row["error"] or 0.0))
    return {"rows": rows[:_SHOWN_CLASSES], "left_out": max(0, len(rows) - _SHOWN_CLASSES), "sets": note}


def _sets(run: Run) -> tuple[Tensor | None, str]:
    """Return the prediction sets of the test examples, calibrated on the held-out rows, and what to say of them."""
    calibration = run.trained.calibration
    if calibration is None:
        return None, "The run is not calibrated (see dropmax calibrate), so there are no prediction sets."
    coverage = calibration.coverage
    if coverage is None:
        return None, f"Too few rows ({len(calibration.labels)}) were held out for prediction sets."
    sets = run.outputs.sets()
    held_truth = sets.gather(-1, run.outputs.labels[:, None]).double().mean()
    size = float(sets.sum(-1).double().mean())
    return sets, (
        f"Prediction sets that promise {coverage:.0%} coverage, calibrated on {len(calibration.labels):,} "
        f"{calibration.source}, hold the truth for {float(held_truth):.1%} of the test examples and have {size:.2f} "
        "classes on average."
    )


def _pairs(run: Run, counts: Any) -> list[dict[str, Any]]:
    both = np.triu(counts + counts.T, 1)
    order = np.argsort(-both, axis=None, kind="stable")[:PAIRS]
    labels, predicted = run.outputs.labels, run.outputs.predicted
    confidence = run.outputs.probs.amax(-1)
    found = []
    for place in order.tolist():
        first, second = divmod(place, len(counts))
        if not both[first, second]:
            break
        taken = ((labels == first) & (predicted == second)) | ((labels == second) & (predicted == first))
        chosen = confidence.masked_fill(~taken, -1.0).argsort(descending=True, stable=True)[: int(taken.sum())]
        pair = {"first": run.classes[first], "second": run.classes[second], "mistakes": int(both[first, second])}
        pair |= {"there": int(counts[first, second]), "back": int(counts[second, first])}
        found.append({**pair, "examples": [_example(run, i) for i in chosen[:SHOWN].tolist()]})
    return found


def disagreements(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return where two runs answer differently, for exactly two of them; None otherwise. Softmax comes first."""
    if len(runs) != 2:
        return None
    base, other = sorted(runs, key=lambda run: run.head.name != "softmax")
    wrong = [run.outputs.predicted != run.outputs.labels for run in (base, other)]
    first, second = ("the first", "the second") if base.label == other.label else (base.label, other.label)
    rows = []
    for title, chosen, surer in (
        (f"Only {second} is right", wrong[0] & ~wrong[1], base),
        (f"Only {first} is right", wrong[1] & ~wrong[0], other),
        ("Both are wrong", wrong[0] & wrong[1], base),
    ):
        shown = surest_mistakes(surer.outputs, chosen, SHOWN)
        examples = [{**_example(base, i), "other": _said(other, i)} for i in shown]
        rows.append({"title": title, "count": int(chosen.sum()), "examples": examples})
    return {"first": base.label, "second": other.label, "counts": contrast(base.outputs, other.outputs), "rows": rows}


def hardest(run: Run, limit: int = HARDEST) -> list[int]:
    """Return the test examples whose truth the model finds least likely, hardest first."""
    return [int(i) for i in run.on_truth.argsort(stable=True)[:limit]]


def hardest_section(run: Run) -> list[dict[str, Any]]:
    """Return the hardest examples with the classes that matter to each: probability and retain probability."""
    chosen = hardest(run)
    exact = answer(run.head, run.features()[chosen], mode="exact", std=True) if run.has_masks else None
    cards = []
    for place, index in enumerate(chosen):
        p, rho = run.outputs.probs[index], run.outputs.retain[index]
        truth, said = int(run.outputs.labels[index]), int(p.argmax())
        rows = [
            {"name": run.classes[k], "p": float(p[k]), "rho": float(rho[k]), "truth": k == truth, "said": k == said}
            for k in _shown(rho if run.has_masks else p, truth, said)
        ]
        card = {**_example(run, index), "given": float(p[truth]), "classes": rows, "over": None}
        if exact is not None and exact.std is not None:
            card["over"] = (float(exact.probs[place, said]), float(exact.std[place, said]))
        cards.append(card)
    return cards


def _example(run: Run, index: int) -> dict[str, Any]:
    originals = Originals(run.trained, run.test, Path(data_place(run.recipe, run.path, run.moved)).expanduser())
    pixels: Any = picture(run.test, index) if run.trained.is_images else None
    if (photograph := originals.picture(index, PHOTO)) is not None:
        pixels = photograph.transpose(1, 2, 0)
    shown = {"image": None if pixels is None else _png(pixels), "text": originals.text(index)}
    return {"index": index, **shown, "truth": run.classes[int(run.outputs.labels[index])], **_said(run, index)}


def _said(run: Run, index: int) -> dict[str, Any]:
    p, k = run.outputs.probs[index].max(-1)
    return {"said": run.classes[int(k)], "p": float(p), "right": int(k) == int(run.outputs.labels[index])}


def _png(pixels: Any) -> dict[str, Any]:
    from PIL import Image

    buffer = io.BytesIO()
    image = Image.fromarray(np.ascontiguousarray(pixels))
    image.thumbnail((PHOTO, PHOTO))
    image.save(buffer, "PNG", optimize=True)
    return {"data": base64.b64encode(buffer.getvalue()).decode(), "width": image.width, "height": image.height}


def _shown(score: Tensor, truth: int, answered: int) -> list[int]:
    if len(score) <= _ALL_CLASSES:
        return list(range(len(score)))
    top = torch.argsort(score, descending=True, stable=True)[:6].tolist()
    return sorted({*top, truth, answered}, key=lambda k: -float(score[k]))
