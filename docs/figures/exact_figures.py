"""Draw the figures of docs/exact.md: ``python docs/figures/exact_figures.py``."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from unittest import mock

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from dropmax import exact
from dropmax.exact import quadrature
from dropmax.exact.quadrature import Walk

HERE = Path(__file__).parent
# Okabe and Ito's colours, which colour-blind readers can tell apart; line styles say the same again.
BLUE, ORANGE, GREEN, PURPLE, BLACK = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#000000"
mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "savefig.dpi": 200})


def enumerated(logits: Tensor, retain_logits: Tensor) -> Tensor:
    """Return the predictive distribution as the sum over all masks, in float64."""
    masks = torch.tensor(list(itertools.product([False, True], repeat=len(logits))))
    retain = torch.sigmoid(retain_logits)
    prior = torch.where(masks, retain, 1 - retain).prod(-1)
    seen = masks | ~masks.any(-1, keepdim=True)
    return prior @ torch.softmax(logits.masked_fill(~seen, -torch.inf), -1)


def sampled(logits: Tensor, retain_logits: Tensor, samples: int) -> Tensor:
    """Return the same from random masks."""
    masks = torch.rand(samples, len(logits), dtype=torch.float64) < torch.sigmoid(retain_logits)
    seen = masks | ~masks.any(-1, keepdim=True)
    return torch.softmax(logits.masked_fill(~seen, -torch.inf), -1).mean(0)


def integrand() -> None:
    """Show F and three integrands over u, with the nodes that float32 uses."""
    logits = torch.tensor([3.0, 2.0, -2.0, -6.0], dtype=torch.float64)
    retain_logits = torch.tensor([-0.4, -0.4, 0.0, 2.0], dtype=torch.float64)
    retain, w = torch.sigmoid(retain_logits), torch.softmax(logits, -1)
    walk = Walk(logits.float()[None], retain_logits.float()[None])
    nodes = walk.nodes(slice(0, 1))[0].double() - float(walk.top - torch.logsumexp(logits, -1))

    def functions(u: Tensor) -> tuple[Tensor, Tensor]:
        x = u.exp()[:, None] * w
        factor = 1 - retain + retain * torch.exp(-x)
        product = factor.prod(-1)
        return product, product[:, None] * retain * x * torch.exp(-x) / factor

    u = torch.linspace(-6, 14, 800, dtype=torch.float64)
    curve, at_nodes = functions(u), functions(nodes)
    figure, axis = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for k, (colour, style) in enumerate(((BLUE, "-"), (ORANGE, "--"), (GREEN, "-."), (PURPLE, (0, (1, 1))))):
        area = float(torch.trapezoid(curve[1][:, k], u))
        axis.plot(u, curve[1][:, k], color=colour, ls=style, lw=1.6, label=f"$h_{k + 1}F$, area {area:.3f}")
        axis.plot(nodes, at_nodes[1][:, k], ".", color=colour, ms=4)
    axis.plot(nodes, torch.full_like(nodes, -0.008), "|", color=BLACK, ms=7, label=f"{len(nodes)} nodes (float32)")
    axis.set(xlabel="$u = \\log s$", ylabel="integrand $h_k(e^u)\\,F(e^u)$", xlim=(-6, 14), ylim=(-0.016, 0.16))
    product = axis.twinx()
    product.plot(u, curve[0], color=BLACK, lw=1, ls=":")
    product.set(ylim=(-0.1, 1.0), ylabel="$F(e^u)$, dotted")
    product.spines["right"].set_visible(True)
    axis.legend(frameon=False, loc="upper right", fontsize=8)
    figure.savefig(HERE / "exact-integrand.png")


def convergence() -> None:
    """Show the error against the number of nodes, and of samples."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, 10, dtype=torch.float64, generator=generator)
    inputs = {
        "ordinary: $o \\sim 3\\,N(0,1)$, $a \\sim 2\\,N(0,1)$": (3 * noise[0], 2 * noise[1], BLUE, "o-"),
        "equal logits, $\\rho = 1/2$": (0 * noise[0], 0 * noise[1], ORANGE, "s--"),
        "nearly all kept, $a = 15$": (3 * noise[0], 0 * noise[1] + 15, GREEN, "^-."),
        "logits spread over 100": (torch.linspace(50, -50, 10, dtype=torch.float64), noise[1], PURPLE, "v:"),
    }
    figure, axis = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for label, (logits, retain_logits, colour, style) in inputs.items():
        truth = enumerated(logits, retain_logits)
        points = []
        for step in torch.linspace(1.0, 0.15, 20).tolist():
            with mock.patch.object(quadrature, "rule_for", partial(quadrature.rule_for, step=step)):
                walk = Walk(logits[None], retain_logits[None])
                error = (exact.predictive(logits, retain_logits) - truth).abs().max()
            points.append((len(walk.nodes(slice(0, 1))[0]), max(float(error), 1e-16)))
        axis.semilogy(*zip(*points, strict=True), style, color=colour, ms=3, lw=1, label=label)
    logits, retain_logits, *_ = next(iter(inputs.values()))
    truth, counts = enumerated(logits, retain_logits), [10, 20, 50, 100, 200, 400]
    torch.manual_seed(0)
    errors = [
        torch.stack([(sampled(logits, retain_logits, n) - truth).abs().max() for _ in range(30)]).median()
        for n in counts
    ]
    axis.semilogy(counts, errors, "x-", color=BLACK, ms=4, lw=1, label="sampling, that many masks (ordinary)")
    axis.set(xlabel="nodes (or samples)", ylabel="largest error of $p(y=k\\,|\\,x)$", xscale="log", ylim=(3e-17, 2))
    axis.set_xticks([10, 20, 50, 100, 200, 400], ["10", "20", "50", "100", "200", "400"])
    axis.minorticks_off()
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    figure.savefig(HERE / "exact-convergence.png")


if __name__ == "__main__":
    torch.set_num_threads(1)
    integrand()
    convergence()
