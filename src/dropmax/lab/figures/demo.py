"""The demo's picture: how the two heads learned, and what DropMax sees in the digits softmax gets most wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from dropmax.workbench import style
from dropmax.workbench.evaluation import Outputs

__all__ = ["draw_demo", "hardest_of_each_class"]


def hardest_of_each_class(outputs: Outputs) -> list[int]:
    """Return, for each class, the example whose truth the model finds least likely.

    >>> import torch
    >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]])
    >>> hardest_of_each_class(Outputs(probs, torch.ones_like(probs), torch.tensor([0, 1, 0])))
    [2, 1]
    """
    on_truth = outputs.probs.gather(-1, outputs.labels[:, None]).squeeze(-1)
    classes = range(outputs.probs.shape[-1])
    return [int(on_truth.masked_fill(outputs.labels != k, 2.0).argmin()) for k in classes]


def draw_demo(
    path: Path, images: Tensor, softmax: Outputs, dropmax: Outputs, logs: dict[str, list[dict[str, Any]]]
) -> None:
    """Draw learning curves over the hardest test digit of each class, with its retain probabilities."""
    plt = style.pyplot()
    figure = plt.figure(figsize=(11, 7.6))
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.0, 1.75])
    _curves(top, logs)
    axes = bottom.subplots(2, 10, width_ratios=[1, 2.2] * 5)
    bottom.suptitle(
        "Of each class, the test digit softmax is most wrong about. Bars: DropMax's retain probability ρ of each "
        "class; dots: its prediction.\n○ the truth   × what softmax says",
        fontsize=10,
    )
    for place, index in enumerate(hardest_of_each_class(softmax)):
        row, column = divmod(place, 5)
        _digit(axes[row, 2 * column], images[index], int(softmax.labels[index]))
        _profile(axes[row, 2 * column + 1], index, softmax, dropmax, labelled=column == 0)
    style.save(figure, path)


def _curves(figure: Any, logs: dict[str, list[dict[str, Any]]]) -> None:
    left, right = figure.subplots(1, 2)
    looks = {"softmax": (style.ORANGE, "--"), "dropmax": (style.BLUE, "-")}
    for name, rows in logs.items():
        colour, line = looks[name]
        measured = [row for row in rows if "validation" in row]
        epochs = [row["epoch"] for row in measured]
        left.plot(epochs, [100 * row["validation"]["error"] for row in measured], line, color=colour, label=name)
        right.plot(epochs, [row["validation"]["nll"] for row in measured], line, color=colour, label=name)
    left.set(title="Validation error", xlabel="epoch", ylabel="%")
    right.set(title="Validation NLL", xlabel="epoch", ylabel="nats")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.legend()


def _digit(axes: Any, image: Tensor, truth: int) -> None:
    axes.imshow(image.squeeze(0).numpy(), cmap="gray_r", interpolation="nearest")
    axes.set_title(f"a {truth}", color=style.TRUTH, fontweight="bold")
    axes.set(xticks=[], yticks=[])
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _profile(axes: Any, index: int, softmax: Outputs, dropmax: Outputs, *, labelled: bool) -> None:
    rho, p = dropmax.retain[index].tolist(), dropmax.probs[index].tolist()
    truth, wrong, answer = int(dropmax.labels[index]), int(softmax.probs[index].argmax()), p.index(max(p))
    classes = range(len(rho))
    axes.bar(classes, rho, width=0.8, color=[style.BLUE if k in (truth, wrong) else "#9CC7E0" for k in classes])
    axes.plot(classes, p, ".", color="black", markersize=5)
    # The marks sit above the bars: o the truth, x what softmax says.
    axes.plot([truth], [1.08], "o", color=style.TRUTH, markersize=6, fillstyle="none", markeredgewidth=1.6)
    axes.plot([wrong], [1.08], "x", color=style.RED, markersize=6, markeredgewidth=1.8)
    colour = style.TRUTH if answer == truth else style.RED
    axes.set_title(f"softmax {wrong} · DropMax {answer}", fontsize=8, color=colour)
    axes.set(xticks=list(classes), ylim=(0, 1.18), yticks=[0, 0.5, 1], xlim=(-0.7, len(rho) - 0.3))
    axes.tick_params(labelsize=7)
    axes.grid(False)
    if not labelled:
        axes.set_yticklabels([])
