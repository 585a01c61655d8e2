"""Appendix B, example by example: Condition 1, its inequality, and the gradients it is about."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dropmax import exact
from dropmax.lab.figures.runs import Subject
from dropmax.lab.stability import is_target_of, on_rivals, posterior_logits
from dropmax.workbench import style

__all__ = ["CAPTION", "Condition", "draw", "measure"]

#: Rivals' retain probabilities within this of one another count as equal, as Condition 1 wants them.
EQUAL = 0.05

CAPTION = (
    "Every training example under Condition 1: the target's retain probability above every rival's (and, strictly, "
    "all rivals' equal; here within 0.05 of each other). (a) The left side of the inequality, DropMax's share of "
    "the target with ρ for the masks minus softmax's, must be positive; it is whenever the target's ρ is the "
    "highest, equal rivals or not. (b) What the inequality stands for: the size of the loss's gradient by the "
    "target's weights, with its expectation over the masks computed exactly, as a multiple of softmax's at the "
    "same weights. Under q, which always keeps the target, as in training, it is never larger. Under p(z|x), of "
    "which the appendix speaks, the target may be dropped too."
)


@dataclass(frozen=True)
class Condition:
    """What :func:`measure` finds for each example."""

    margin: Tensor  #: rho of the target minus the highest of a rival
    spread: Tensor  #: the highest minus the lowest rho of a rival
    left_side: Tensor  #: of the inequality
    under_q: Tensor  #: the gradient's size under the masks' posterior, as a multiple of softmax's
    under_p: Tensor  #: the same under their prior

    @property
    def met(self) -> Tensor:
        """Whether the target's rho is the highest."""
        return self.margin > 0

    @property
    def strictly_met(self) -> Tensor:
        """Whether, also, the rivals' are equal."""
        return self.met & (self.spread <= EQUAL)


def measure(logits: Tensor, retain_logits: Tensor, posterior: Tensor, target: Tensor) -> Condition:
    """Measure Condition 1 on examples with class logits o, retain logits a, q(z | x, y) and labels.

    The left side of the inequality is ``rho_t e^o_t / sum_k rho_k e^o_k - p_t`` with ``p = softmax(o)``. Written as
    ``p_t sum_k p_k (rho_t - rho_k) / sum_k p_k rho_k`` nothing cancels where p_t is close to 1.

    >>> o, a = torch.zeros(1, 3), torch.tensor([[1.0, -1.0, -1.0]])
    >>> found = measure(o, a, torch.tensor([[1.0, 0.5, 0.5]]), torch.tensor([0]))
    >>> bool(found.strictly_met), round(float(found.left_side), 4)
    (True, 0.2428)
    """
    rho, p, t = retain_logits.sigmoid(), logits.softmax(-1), target[:, None]
    rho_t, p_t = rho.gather(-1, t), p.gather(-1, t).squeeze(-1)
    is_target = is_target_of(rho, target)
    rivals = rho.masked_fill(is_target, -1.0).amax(-1), rho.masked_fill(is_target, 2.0).amin(-1)
    left = p_t * (p * (rho_t - rho)).sum(-1) / (p * rho).sum(-1)
    # dE[-log p(t | z)]/do_t = E[p(t | z)] - 1, and the gradient by w_t is that times h.
    under_q, under_p = (
        on_rivals(exact.predictive(logits, masks), is_target) / on_rivals(p, is_target).clamp(min=1e-300)
        for masks in (posterior_logits(posterior, is_target).to(logits), retain_logits)
    )
    return Condition((rho_t.squeeze(-1) - rivals[0]), rivals[0] - rivals[1], left, under_q, under_p)


def draw(subject: Subject) -> tuple[Any, str]:
    """Draw both panels over a run's training set."""
    run = subject.with_masks()
    o, a = run.logits("train")
    y = run.train.labels
    with torch.no_grad():
        q = run.head.posterior_probs(run.features("train"), y)
    found = measure(o, a, q, y)
    figure, (left, right) = style.pyplot().subplots(1, 2, figsize=(style.PAGE, 3.1))
    shown = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))[:3000]
    for kind, colour, mark, label in (
        (found.strictly_met, style.BLUE, "o", "meets Condition 1"),
        (found.met & ~found.strictly_met, style.ORANGE, "^", "target highest, rivals differ"),
        (~found.met, style.GREY, "x", "a rival above the target"),
    ):
        chosen = shown[kind[shown]]
        if not len(chosen):
            continue
        left.plot(
            found.margin[chosen], found.left_side[chosen], mark, color=colour, markersize=3, alpha=0.6,
            markeredgewidth=0.8 if mark == "x" else 0, label=f"{label} ({int(kind.sum()):,})",
        )  # fmt: skip
    size = float(found.left_side.abs().quantile(0.02))
    left.set_yscale("symlog", linthresh=10 ** math.ceil(math.log10(max(size, 1e-12))))
    left.axhline(0, color="black", linewidth=0.8)
    left.set(xlabel=r"$\rho_t - \max_{k\neq t}\rho_k$", ylabel="left side of the inequality")
    style.panel(left, "a", "the inequality")
    # Far beyond these everything is the same: as good as no gradient, and as good as only DropMax's.
    under_q, under_p = found.under_q.clamp(1e-4, 1e6), found.under_p.clamp(1e-4, 1e6)
    low, high = float(torch.minimum(under_q, under_p).min()), float(torch.maximum(under_q, under_p).max())
    wide = high / low > 10
    if wide:
        edges = torch.logspace(math.log10(low), math.log10(max(2.0, high)), 60).tolist()
    else:
        edges = torch.linspace(low, max(1.05, high), 60).tolist()
    right.hist(under_q, edges, color=style.BLUE, alpha=0.85, label="masks from q (training)")
    right.hist(under_p, edges, histtype="step", color=style.RED, linewidth=1.4, label="masks from p(z|x)")
    right.axvline(1, color="black", linewidth=0.8)
    right.set(xlabel="gradient by $w_t$: DropMax's / softmax's", ylabel="training examples")
    right.set_xscale("log" if wide else "linear")
    style.panel(right, "b", "the gradient it stands for")
    figure.legend(loc="outside lower center", ncol=3, fontsize=7.5, handletextpad=0.3)
    return figure, _words(found)


def _words(found: Condition) -> str:
    def holds(kind: Tensor) -> str:
        return f"{int((found.left_side[kind] > 0).sum()):,} of {int(kind.sum()):,}"

    smaller_q, smaller_p = (100 * float((x <= 1 + 1e-9).double().mean()) for x in (found.under_q, found.under_p))
    strictly = f"{holds(found.strictly_met)} that meet Condition 1, and on"
    if not bool(found.strictly_met.any()):  # with many classes rivals' rho are never equal
        strictly = "(no example meets Condition 1 strictly)"
    return (
        f"Measured on {len(found.margin):,} training examples: the inequality holds on {strictly}"
        f" {holds(found.met)} whose target has the highest ρ. The gradient is no "
        f"larger than softmax's on {smaller_q:.1f} % under q and on {smaller_p:.1f} % under p."
    )
