"""Appendix: decision regions of softmax and of DropMax with fixed retain probabilities, on a problem in the plane."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dropmax.classifier import Classifier
from dropmax.heads import make_head
from dropmax.lab.figures.runs import Subject
from dropmax.workbench import style
from dropmax.workbench.networks import MLP

__all__ = ["CAPTION", "draw", "fit", "problem"]

CAPTION = (
    "Decision regions of softmax, and of DropMax with the same retain probability ρ for every rival, masks drawn "
    "again for each point at each step. Black: where the answer changes; white: where the highest probability is "
    "0.6, 0.8, 0.95."
)
_RETAIN = (0.8, 0.6, 0.4, 0.2)
_STEPS = 600
#: Light grounds for the regions, and the marks of the points on them, dark and of different shapes.
_GROUNDS = ("#CFE3F1", "#FBE7BF", "#C9EBDF", "#F6D3C1", "#EFDCE8")
_DARK = ("#0072B2", "#9A6A00", "#00694D", "#A34700", "#8F4E73")
_MARKS = ("o", "s", "^", "D", "v")


def problem(seed: int = 0, each: int = 60) -> tuple[Tensor, Tensor]:
    """Return points of five overlapping classes around the origin, (N, 2), and their labels."""
    generator = torch.Generator().manual_seed(seed)
    angles = torch.arange(5) * (2 * torch.pi / 5)
    centres = 1.6 * torch.stack([angles.cos(), angles.sin()], -1)
    labels = torch.arange(5).repeat_interleave(each)
    return centres[labels] + 0.75 * torch.randn(len(labels), 2, generator=generator), labels


def fit(points: Tensor, labels: Tensor, retain: float | None, *, steps: int, seed: int = 0) -> Classifier:
    """Train a small network on the plane with softmax, or with masks that keep rivals with probability ``retain``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = MLP(2, hidden=(32, 32))
        name, options = ("softmax", {}) if retain is None else ("random-dropmax", {"retain": retain})
        model = Classifier(net, make_head(name, net.out_features, int(labels.max()) + 1, **options))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(points, labels)
            loss.total.backward()
            optimizer.step()
    model.eval()
    return model


def draw(subject: Subject) -> tuple[Any, str]:
    """Train five small networks and draw their decision regions; no run is needed."""
    points, labels = problem()
    fresh, fresh_labels = problem(seed=1, each=2000)
    figure, axes = style.pyplot().subplots(1, 1 + len(_RETAIN), figsize=(style.PAGE, 1.6), sharex=True, sharey=True)
    reach = 3.6
    line = torch.linspace(-reach, reach, 161)
    grid = torch.cartesian_prod(line, line)
    errors = []
    for panel, retain in zip(axes, (None, *_RETAIN), strict=True):
        model = fit(points, labels, retain, steps=_STEPS)
        _regions(panel, model, line, grid)
        for k in range(5):
            chosen = points[labels == k]
            panel.plot(
                chosen[:, 0], chosen[:, 1], _MARKS[k], color=_DARK[k], markersize=1.8, markeredgewidth=0, alpha=0.85
            )
        title = "softmax" if retain is None else f"ρ = {retain:g}"
        panel.set_title(title, fontsize=9)
        panel.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
        style.bare(panel)
        with torch.no_grad():
            error = float((model.predict_proba(fresh).argmax(-1) != fresh_labels).double().mean())
        errors.append(f"{title} {100 * error:.1f} %")
    return figure, f"Error on 10,000 fresh points: {', '.join(errors)}."


def _regions(axes: Any, model: nn.Module, line: Tensor, grid: Tensor) -> None:
    with torch.no_grad():
        probs = model.predict_proba(grid)  # type: ignore[operator]
    shape = (len(line), len(line))
    answer = probs.argmax(-1).view(shape).T
    surest = probs.amax(-1).view(shape).T
    axes.contourf(line, line, answer, levels=[k - 0.5 for k in range(6)], colors=_GROUNDS)
    axes.contour(line, line, surest, levels=[0.6, 0.8, 0.95], colors="white", linewidths=[1.4, 1.0, 0.7])
    for k in range(5):
        axes.contour(line, line, (answer == k).float(), levels=[0.5], colors="black", linewidths=0.9)
