"""How good DropMax's approximations are on a trained model, measured against exact inference."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
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

__all__ = ["Diagnosis", "confusion_tracking", "diagnose"]

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
    found = {}
    for kind, chosen in (("target", is_target), ("rivals", ~is_target)):
        found[kind] = {
            "rho": rho[chosen].mean().item(),
            "q": q[chosen].mean().item(),
            "true": true[chosen].mean().item(),
            "difference": (q - true)[chosen].abs().mean().item(),
        }
    generator = torch.Generator().manual_seed(0)
    count = int((~is_target).sum())
    shown = torch.randperm(count, generator=generator)[:2000].to(q.device)
    pairs = torch.stack([true[~is_target][shown], q[~is_target][shown]], -1).tolist()
    return found, [(x, z) for x, z in pairs]


def _monte_carlo(o: Tensor, a: Tensor, seed: int) -> list[dict[str, float]]:
    truth = exact.predictive(o.double(), a.double())
    exact_seconds = _seconds(lambda: exact.predictive(o, a))
    rows = []
    for samples in MC_SAMPLES:
        generator = torch.Generator(o.device).manual_seed(seed)
        error = monte_carlo(o, a, samples, generator).double() - truth
        seconds = _seconds(lambda s=samples, g=generator: monte_carlo(o, a, s, g))  # type: ignore[misc]
        rows.append(
            {
                "samples": samples,
                "rms_error": error.square().mean().sqrt().item(),
                "largest_error": error.abs().max().item(),
                "time_ratio": seconds / exact_seconds,
            }
        )
    return rows


def _modes(head: MaskedHead, h: Tensor, y: Tensor) -> dict[str, Any]:
    probs = {mode: head.predict_proba(h, mode) for mode in ("mean", "exact")}
    found: dict[str, Any] = {
        mode: {
            "error": metrics.error(p, y),
            "nll": metrics.nll(p, y),
            "ece": metrics.ece(p, y),
            "confidence": p.max(-1).values.mean().item(),
        }
        for mode, p in probs.items()
    }
    found["difference"] = (probs["mean"] - probs["exact"]).abs().mean().item()
    return found


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
    confused = (labels * num_classes + predicted).bincount(minlength=num_classes**2).view(num_classes, num_classes)
    rivals = ~torch.eye(num_classes, dtype=torch.bool)
    of_pairs = [(matrix / count[:, None])[rivals].numpy() for matrix in (means, confused)]
    return float(require_scipy().spearmanr(*of_pairs).statistic)


def _seconds(work: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
