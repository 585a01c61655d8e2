"""How good DropMax's approximations are on a trained model, measured against exact inference."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from timeit import repeat
from typing import Any

import torch
from torch import Tensor

from dropmax import exact, metrics
from dropmax.classifier import Classifier
from dropmax.errors import InvalidValue
from dropmax.functional import _wide
from dropmax.heads.dropmax import DropMax
from dropmax.heads.masked import MaskedHead, monte_carlo
from dropmax.lab.stability import gradient_stability, is_target_of
from dropmax.lab.statistics import require_scipy
from dropmax.workbench import style
from dropmax.workbench.evaluation import confusions

__all__ = ["Diagnosis", "confusion_tracking", "diagnose", "draw_diagnosis"]

MC_SAMPLES = (1, 10, 100, 1000)


@dataclass(frozen=True)
class Diagnosis:
    """Everything :func:`diagnose` measures.

    Attributes:
        examples: how many were looked at.
        posterior: for ``target`` and ``rivals``: mean of q and of the true posterior marginal p(z_k = 1 | x, y), and
            the mean absolute difference. For rivals also the mean of rho.
        monte_carlo: for each S: root mean square and largest error of the sampled probabilities, and its time as a
            multiple of exact inference's.
        modes: error, NLL, ECE and mean confidence of the mean prediction and of the exact expectation, and the mean
            absolute difference of their probabilities (``difference``).
        gradient: for the parameter groups psi and phi: standard deviation of the sampled likelihood's gradient and
            its bias, both as multiples of the exact gradient's norm. Empty for heads without a posterior.
        stability: what Appendix B is about, measured (:func:`dropmax.lab.stability.gradient_stability`).
        marginals: the pairs (true posterior, q) of rivals, for drawing; at most 2,000.
    """

    examples: int
    posterior: dict[str, dict[str, float]]
    monte_carlo: list[dict[str, float]]
    modes: dict[str, Any]
    gradient: dict[str, dict[str, float]]
    stability: dict[str, dict[str, float]]
    marginals: list[tuple[float, float]]

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the pairs for drawing."""
        found = asdict(self)
        del found["marginals"]
        return found


def diagnose(
    model: Classifier, batches: Iterable[tuple[Tensor, Tensor]], *, repeats: int = 50, seed: int = 0
) -> Diagnosis:
    """Measure the approximations of a trained model over labelled batches.

    Args:
        model: a classifier whose head learns masks (``dropmax`` or ``dropmax-qp``).
        batches: of inputs and labels.
        repeats: draws of the sampled gradient.
        seed: of every draw.

    >>> from torch import nn
    >>> model = Classifier(nn.Identity(), DropMax(4, 3))
    >>> found = diagnose(model, [(torch.randn(9, 4), torch.arange(9) % 3)], repeats=3)
    >>> [row["samples"] for row in found.monte_carlo]
    [1, 10, 100, 1000]
    """
    head = model.head
    if not isinstance(head, MaskedHead):
        raise InvalidValue(f"the head {head.name!r} learns no masks, so there is nothing to diagnose: use dropmax")
    model.eval()
    with torch.no_grad():
        pairs = [(_wide(model.net(x)), y) for x, y in batches]
        h, y = torch.cat([h for h, _ in pairs]), torch.cat([y for _, y in pairs])
        o, a = _wide(head.classifier(h)), _wide(head.retain(h))
        posterior, marginals = _posterior(head, h, o, a, y)
        return Diagnosis(
            examples=len(y),
            posterior=posterior,
            monte_carlo=_monte_carlo(o, a, seed),
            modes=_modes(head, h, y),
            gradient=_gradient(head, h, y, repeats, seed) if isinstance(head, DropMax) else {},
            stability=gradient_stability(o, a, head.posterior_probs(h, y), y),
            marginals=marginals,
        )


def _posterior(
    head: MaskedHead, h: Tensor, o: Tensor, a: Tensor, y: Tensor
) -> tuple[dict[str, dict[str, float]], list[tuple[float, float]]]:
    true, q, rho = exact.posterior(o, a, y), head.posterior_probs(h, y), a.sigmoid()
    is_target = is_target_of(q, y)
    values = {"rho": rho, "q": q, "true": true, "difference": (q - true).abs()}
    found = {
        kind: {name: value[chosen].mean().item() for name, value in values.items()}
        for kind, chosen in (("target", is_target), ("rivals", ~is_target))
    }
    of_rivals = true[~is_target], q[~is_target]
    shown = torch.randperm(len(of_rivals[0]), generator=torch.Generator().manual_seed(0))[:2000].to(q.device)
    return found, list(zip(*(values[shown].tolist() for values in of_rivals), strict=True))


def _monte_carlo(o: Tensor, a: Tensor, seed: int) -> list[dict[str, float]]:
    truth = exact.predictive(o.double(), a.double())
    exact_seconds = min(repeat(lambda: exact.predictive(o, a), repeat=3, number=1))
    rows = []
    for samples in MC_SAMPLES:
        generator = torch.Generator(o.device).manual_seed(seed)
        error = monte_carlo(o, a, samples, generator).double() - truth
        seconds = min(repeat(partial(monte_carlo, o, a, samples, generator), repeat=3, number=1))
        errors = {"rms_error": error.square().mean().sqrt().item(), "largest_error": error.abs().max().item()}
        rows.append({"samples": samples, **errors, "time_ratio": seconds / exact_seconds})
    return rows


def _modes(head: MaskedHead, h: Tensor, y: Tensor) -> dict[str, Any]:
    probs = {mode: head.predict_proba(h, mode) for mode in ("mean", "exact")}
    measures: dict[str, Any] = {"error": metrics.error, "nll": metrics.nll, "ece": metrics.ece}
    found: dict[str, Any] = {}
    for mode, p in probs.items():
        found[mode] = {name: measure(p, y) for name, measure in measures.items()}
        found[mode]["confidence"] = p.max(-1).values.mean().item()
    return found | {"difference": (probs["mean"] - probs["exact"]).abs().mean().item()}


def _gradient(head: DropMax, h: Tensor, y: Tensor, repeats: int, seed: int) -> dict[str, dict[str, float]]:
    """Compare the gradient of the sampled likelihood with the exact one, over a batch of at most 100 rows."""
    h, y = h[:100], y[:100]
    groups = {"psi": list(head.classifier.parameters()), "phi": list(head.correction.parameters())}
    likelihood, samples = head.likelihood, head.samples
    generator = torch.Generator().manual_seed(seed)

    def gradients(noise: Tensor | None) -> dict[str, Tensor]:
        with torch.enable_grad():
            nll = head.terms(head.logits(h), y, head.check_noise(noise, h, h.shape[:-1]))["cross_entropy"].mean()
            flat = torch.autograd.grad(nll, [p for ps in groups.values() for p in ps], materialize_grads=True)
        parts = iter(flat)
        return {name: torch.cat([next(parts).flatten() for _ in ps]).double() for name, ps in groups.items()}

    try:
        head.likelihood = "exact"
        truth = gradients(None)
        head.likelihood, head.samples = "sampled", 1
        draws = [gradients(torch.rand(len(y), head.num_classes, generator=generator).to(h)) for _ in range(repeats)]
    finally:
        head.likelihood, head.samples = likelihood, samples
    found = {}
    for name, expected in truth.items():
        sampled = torch.stack([draw[name] for draw in draws])
        norm = expected.norm().item() or math.nan
        found[name] = {
            "exact_norm": expected.norm().item(),
            "sampled_std": sampled.var(0).sum().sqrt().item() / norm,
            "sampled_bias": (sampled.mean(0) - expected).norm().item() / norm,
        }
    return found


def confusion_tracking(retain: Tensor, labels: Tensor, predicted: Tensor) -> float:
    """Return how well rho knows what is really confused: a rank correlation between 1 and -1.

    Spearman's correlation over all pairs j != k of classes between the mean of rho_k over the examples of class j
    and how many of those another model took for k.

    Args:
        retain: rho of N examples, (N, K).
        labels: their classes, (N,).
        predicted: what the other model, usually softmax, took them for, (N,).

    >>> labels = torch.tensor([0, 0, 1, 1, 2, 2])
    >>> predicted = torch.tensor([0, 1, 1, 0, 2, 2])  # 0 and 1 are confused, 2 never is
    >>> rho = torch.tensor([[0.8, 0.5, 0.2]] * 2 + [[0.5, 0.8, 0.2]] * 2 + [[0.2, 0.2, 0.8]] * 2)
    >>> round(confusion_tracking(rho, labels, predicted), 3)
    1.0
    """
    num_classes = retain.shape[-1]
    count = labels.bincount(minlength=num_classes).clamp_min(1)
    means = torch.zeros(num_classes, num_classes, dtype=torch.float64).index_add_(0, labels, retain.double())
    confused = confusions(labels, predicted, num_classes)
    rivals = ~torch.eye(num_classes, dtype=torch.bool)
    of_pairs = [(matrix / count[:, None])[rivals].numpy() for matrix in (means, confused)]
    return float(require_scipy().spearmanr(*of_pairs).statistic)


def draw_diagnosis(path: Path, found: Diagnosis, title: str) -> None:
    """Draw q against the true posterior, Monte Carlo's error against S, and mean against exact prediction."""
    figure, (posterior, sampling, modes) = style.pyplot().subplots(1, 3, figsize=(11, 3.6), width_ratios=[1.1, 1.1, 1])
    figure.suptitle(title, fontsize=10)
    true, q = zip(*found.marginals, strict=True)
    posterior.plot([0, 1], [0, 1], color=style.GREY, linewidth=1)
    posterior.plot(true, q, ".", color=style.BLUE, markersize=3, alpha=0.35)
    posterior.set(title="Rivals' masks given the label", xlim=(0, 1), ylim=(0, 1))
    posterior.set(xlabel="true posterior $p(z_k=1\\,|\\,x,y)$", ylabel="$q(z_k=1\\,|\\,x,y)$")

    samples, errors = ([row[name] for row in found.monte_carlo] for name in ("samples", "rms_error"))
    sampling.loglog(samples, errors, "o-", color=style.BLUE)
    for row in found.monte_carlo:
        place, side = ((6, 5), "left") if row["samples"] < 1000 else ((-4, -14), "right")
        words, at = f"{row['time_ratio']:.2g}× exact's time", (row["samples"], row["rms_error"])
        sampling.annotate(words, at, textcoords="offset points", xytext=place, ha=side, fontsize=7.5)
    sampling.set(title="Monte Carlo against exact", xlabel="masks sampled, S", ylabel="rms error of a probability")
    sampling.set(xlim=(0.7, 4000), ylim=(min(errors) / 2, max(errors) * 2.5))

    factors = {"error": 100, "ece": 100, "nll": 10}
    for shift, mode, colour, hatch in ((-0.19, "mean", style.BLUE, ""), (0.19, "exact", style.ORANGE, "//")):
        values = [factor * found.modes[mode][key] for key, factor in factors.items()]
        look = {"color": colour, "hatch": hatch, "label": mode, "edgecolor": "white"}
        bars = modes.bar([i + shift for i in range(3)], values, width=0.36, **look)
        modes.bar_label(bars, [f"{v:.2f}" for v in values], fontsize=7.5)
    modes.set(title="Mean and exact prediction", xticks=range(3), xticklabels=["error %", "ECE %", "NLL × 10"])
    modes.grid(False)
    modes.legend()
    style.save(figure, path)
