"""Appendix: how uncertainty grows with noise, sampled and exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dropmax import exact
from dropmax.heads.masked import sampled
from dropmax.lab.figures.runs import Run, Subject, picture
from dropmax.workbench import style

__all__ = ["CAPTION", "draw", "keep_the_target"]

CAPTION = (
    "Predicted probability of the truth, (a) as noise is added to an example, over 1,000 sampled masks (grey dots; "
    "blue bars are their mean and standard deviation) beside the exact mean and standard deviation (orange line "
    "and band); (b) the same with the target's mask not sampled but replaced by its ρ, which takes out variance "
    "that says nothing; (c) as (b), for real test examples of growing difficulty."
)
_SAMPLES = 1000
_LEVELS = 11
_REAL = 9


def keep_the_target(o: Tensor, a: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits of the problem with each target mask replaced by its rho: o_t + log rho_t, always kept."""
    t = target[:, None]
    return o.scatter_add(-1, t, torch.nn.functional.logsigmoid(a.gather(-1, t))), a.scatter(-1, t, 60.0)


def draw(subject: Subject) -> tuple[Any, str]:
    """Draw the three panels, each over the pictures it is about."""
    run = subject.with_masks()
    generator = torch.Generator().manual_seed(0)
    index = _example(run)
    target = int(run.outputs.labels[index])
    sigmas, images, o, a = _noisy(run, index, generator)
    figure, axes = style.pyplot().subplots(2, 3, figsize=(style.PAGE, 2.9), height_ratios=[4.6, 1], sharey="row")
    row = torch.full((len(sigmas),), target)
    fixed = keep_the_target(o, a, row)
    panels = zip(axes[0], ((o, a), fixed), strict=False)
    off = [_panel(panel, sigmas, *logits, row, generator) for panel, logits in panels]
    for column in (0, 1):
        axes[0, column].set(xlabel="noise σ", xlim=(-0.06, 1.06), xticks=[0, 0.5, 1])
        _strip(axes[1, column], [images[i] for i in range(0, len(images), 2)])
    real, kept = _of_growing_difficulty(run)
    _panel(axes[0, 2], torch.arange(len(real)).double(), *kept, run.outputs.labels[real], generator)
    axes[0, 2].set(xlabel="test examples, easy to hard", xticks=[], xlim=(-0.5, len(real) - 0.5))
    _strip(axes[1, 2], [picture(run.test, i) for i in real])
    axes[0, 0].set(ylabel="p(truth | x, z)", ylim=(-0.04, 1.04), yticks=[0, 0.5, 1])
    sure = float(exact.predictive(*fixed)[0, target]) > 0.5  # then the curve comes down from the left
    axes[0, 1].legend(loc="lower left" if sure else "upper right", fontsize=7)
    style.panel(axes[0, 0], "a", "all masks sampled")
    style.panel(axes[0, 1], "b", "target's mask at ρ")
    style.panel(axes[0, 2], "c", "real examples")
    return figure, (
        f"{run.path.name}, test example {index} (class {run.classes[target]}); noise is Gaussian, one pattern "
        "scaled by σ (1 is the range from black to white), cut to the range of pixels. Largest difference of the "
        f"sampled means from exact: (a) {off[0]:.3f}, (b) {off[1]:.3f}."
    )


def _example(run: Run) -> int:
    """Return the test example of class 1, as in the paper, whose truth the model is surest of; else of any class."""
    is_one = run.outputs.labels == 1
    return int((run.on_truth.masked_fill(~is_one, -1.0) if bool(is_one.any()) else run.on_truth).argmax())


def _noisy(run: Run, index: int, generator: torch.Generator) -> tuple[Tensor, list[Any], Tensor, Tensor]:
    clean = torch.from_numpy(np.ascontiguousarray(picture(run.test, index))).double() / 255
    clean = clean[None] if clean.ndim == 2 else clean.permute(2, 0, 1)
    pattern = torch.randn(clean.shape, generator=generator, dtype=clean.dtype)
    sigmas = torch.linspace(0, 1, _LEVELS, dtype=torch.float64)
    pixels = ((clean + sigmas[:, None, None, None] * pattern).clamp(0, 1) * 255).round().to(torch.uint8)
    head: Any = run.head
    with torch.no_grad():
        h = run.model.net(run.trained.prepare(pixels))
        o, a = head.classifier(h).double(), head.retain(h).double()
    shown = [(x[0] if len(x) == 1 else x.permute(1, 2, 0)).numpy() for x in pixels]
    return sigmas, shown, o, a


def _of_growing_difficulty(run: Run) -> tuple[list[int], tuple[Tensor, Tensor]]:
    """Return test examples at even steps of the probability of their truth, surest first, with logits as in (b)."""
    labels = run.outputs.labels
    o, a = keep_the_target(*run.logits(), labels)
    on_truth = exact.predictive(o, a).gather(-1, labels[:, None]).squeeze(-1)
    wanted = torch.linspace(float(on_truth.max()), float(on_truth.min()), _REAL)
    chosen = list(dict.fromkeys(int((on_truth - level).abs().argmin()) for level in wanted))
    return chosen, (o[chosen], a[chosen])


def _panel(axes: Any, x: Tensor, o: Tensor, a: Tensor, target: Tensor, generator: torch.Generator) -> float:
    """Draw samples beside the exact moments; return the largest difference of their means."""
    _, probs = sampled(o, a.sigmoid(), _SAMPLES, generator)
    samples = probs.gather(-1, target.expand(_SAMPLES, -1).unsqueeze(-1)).squeeze(-1)
    mean = exact.predictive(o, a).gather(-1, target[:, None]).squeeze(-1)
    std = exact.variance(o, a).gather(-1, target[:, None]).squeeze(-1).sqrt()
    step = float(x[1] - x[0]) if len(x) > 1 else 1.0
    shown = samples[:150]
    jitter = (torch.rand(shown.shape, generator=generator) - 0.5) * 0.5 * step
    axes.plot((x + jitter).flatten(), shown.flatten(), ".", color=style.GREY, markersize=1.6, alpha=0.35, mew=0)
    axes.fill_between(x, (mean - std).clamp(0), (mean + std).clamp(max=1), color=style.ORANGE, alpha=0.3, linewidth=0)
    axes.plot(x, mean, color=style.ORANGE, linewidth=2, label="exact mean ± std")
    middle, spread = samples.mean(0), samples.std(0, correction=0)
    bars = torch.stack([torch.minimum(spread, middle), torch.minimum(spread, 1 - middle)]).numpy()  # end at 0 and 1
    axes.errorbar(
        x, middle, bars, fmt="o", color=style.BLUE, markersize=2.6, elinewidth=0.9, capsize=1.8,
        label="1,000 samples",
    )  # fmt: skip
    return float((samples.mean(0) - mean).abs().max())


def _strip(axes: Any, images: list[Any]) -> None:
    style.bare(axes)
    axes.set(xlim=(-0.5, len(images) - 0.5), ylim=(-0.5, 0.5))
    for place, image in enumerate(images):
        inset = axes.inset_axes([place / len(images), 0, 0.94 / len(images), 1])
        style.image(inset, image)
