"""The parts of a report that look at single classes and examples: the confusion graph and the hardest twenty."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dropmax.lab.figures.confusion_graph import MOST_CLASSES, links
from dropmax.lab.figures.runs import Run, picture
from dropmax.lab.report.html import name, picture_tag, table
from dropmax.lab.report.svg import graph, profile
from dropmax.workbench.evaluation import answer

__all__ = ["confusion_section", "hardest", "hardest_section"]

HARDEST = 20
#: With more classes than this, a profile shows only those that matter.
_ALL_CLASSES = 12
_PAIRS = 12


def confusion_section(run: Run, *, several: bool) -> Iterator[str]:
    """Say which classes are confused: what rho says, and what was measured."""
    yield "<h2>What is confused with what</h2>"
    found = links(run.outputs)
    who = f" The run is {name(str(run.path), 60)}." if several else ""
    if run.has_masks:
        yield (
            "<p>DropMax keeps rivals that deserve attention. Two classes are linked where, for test examples "
            "predicted as one, the retain probability of the other stands out; the wider the link, the more often. "
            f"It needs no labels: beside it are the mistakes the labels show.{who}</p>"
        )
    else:
        yield f"<p>This head learns no masks, so the links are its measured mistakes.{who}</p>"
    if not found:
        yield "<p>No two classes are linked: for no test example does a rival stand out.</p>"
        return
    every = len(run.classes) if len(run.classes) <= MOST_CLASSES else 0
    yield f'<div class="row">{graph(found, run.classes, every=every, by_mistakes=not run.has_masks)}'
    rows = [
        [
            f"{name(run.classes[one.first], 24)} – {name(run.classes[one.second], 24)}",
            *([f"{100 * one.flagged:.1f} %"] if run.has_masks else []),
            f"{one.mistakes:,}",
        ]
        for one in found[:_PAIRS]
    ]
    columns = ["classes", *(["flagged by ρ"] if run.has_masks else []), "mistakes"]
    yield table(columns, rows, numbers=range(1, len(columns))) + "</div>"
    if not every:
        yield f'<p class="note">Shown are the strongest links; there are {len(run.classes)} classes in all.</p>'


def hardest(run: Run, limit: int = HARDEST) -> list[int]:
    """Return the test examples whose truth the model finds least likely, hardest first."""
    on_truth = run.outputs.probs.gather(-1, run.outputs.labels[:, None]).squeeze(-1)
    return [int(i) for i in on_truth.argsort(stable=True)[:limit]]


def hardest_section(run: Run, *, several: bool) -> Iterator[str]:
    """Show the hardest examples with their retain profiles."""
    chosen = hardest(run)
    yield f"<h2>The {len(chosen)} hardest examples</h2>"
    who = f" The run is {name(str(run.path), 60)}." if several else ""
    bars = "Bars are retain probabilities ρ, dots the prediction." if run.has_masks else "Dots are the prediction."
    yield (
        f'<p>Test examples whose truth the model finds least likely. {bars} <span class="truth">○ the truth</span>, '
        f'<span class="answer">× the answer</span>. Some labels may be wrong: look.{who}</p>'
    )
    if run.has_masks:
        yield (
            '<p class="note">“Over all masks”: the exact mean of the answer\'s probability and its standard '
            "deviation over the masks. A large deviation says that the answer hangs on which rivals are kept.</p>"
        )
    over_masks = answer(run.head, run.features()[chosen], mode="exact", std=True)
    cards = []
    for place, index in enumerate(chosen):
        p, rho, truth = run.outputs.probs[index], run.outputs.retain[index], int(run.outputs.labels[index])
        k = int(p.argmax())
        shown = _shown(rho if run.has_masks else p, truth, k)
        rows = [(run.classes[c], float(rho[c]), float(p[c])) for c in shown]
        words = [
            f'<span class="soft">test example {index:,}</span>',
            f"truth {name(run.classes[truth], 30, 'name truth')}, given {float(p[truth]):.2g}",
            f"answer {name(run.classes[k], 30, 'name answer' if k != truth else 'name truth')}, {float(p[k]):.2f}",
        ]
        if run.has_masks and over_masks.std is not None:
            mean, deviation = float(over_masks.probs[place, k]), float(over_masks.std[place, k])
            words.append(f"over all masks {mean:.2f} ± {deviation:.2f}")
        image = ""
        if run.trained.is_images:
            image = picture_tag(picture(run.test, index), f"test example {index}, {run.classes[truth]}")
        chart = profile(rows, shown.index(truth), shown.index(k), bars=run.has_masks)
        cards.append(f'<div class="card"><header>{image}<p>{"<br>".join(words)}</p></header>{chart}</div>')
    yield f'<div class="cards">{"".join(cards)}</div>'
    if len(run.classes) > _ALL_CLASSES:
        what = "retain probabilities" if run.has_masks else "probabilities"
        yield f'<p class="note">Of {len(run.classes)} classes: those of the highest {what}, the truth, the answer.</p>'


def _shown(score: torch.Tensor, truth: int, answer: int) -> list[int]:
    if len(score) <= _ALL_CLASSES:
        return list(range(len(score)))
    top = score.argsort(descending=True, stable=True)[:6].tolist()
    return sorted({*top, truth, answer}, key=lambda k: -float(score[k]))
