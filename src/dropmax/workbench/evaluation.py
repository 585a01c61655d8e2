"""What a model says about a split, and how good it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dropmax import metrics
from dropmax.classifier import Classifier

__all__ = ["Measurement", "Outputs", "confusable", "measure", "predict"]


@dataclass(frozen=True)
class Outputs:
    """Probabilities, retain probabilities and labels, one row an example."""

    probs: Tensor
    retain: Tensor
    labels: Tensor


@torch.no_grad()
def predict(
    model: Classifier,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    mode: str = "mean",
    samples: int = 100,
    generator: torch.Generator | None = None,
) -> Outputs:
    """Return a model's answers over batches of (inputs, labels), in evaluation mode.

    >>> from torch import nn
    >>> from dropmax import DropMax
    >>> model = Classifier(nn.Identity(), DropMax(4, 3))
    >>> predict(model, [(torch.randn(5, 4), torch.zeros(5, dtype=torch.long))]).probs.shape
    torch.Size([5, 3])
    """
    was_training = model.training
    model.eval()
    rows = []
    for x, y in batches:
        features = model.net(x)
        probs = model.head.predict_proba(features, mode, samples=samples, generator=generator)
        rows.append((probs.cpu(), model.head.retain_probs(features).cpu(), y.cpu()))
    model.train(was_training)
    if not rows:
        empty = torch.empty(0, model.head.num_classes)
        return Outputs(empty, empty, torch.empty(0, dtype=torch.long))
    probs, retain, labels = (torch.cat(parts) for parts in zip(*rows, strict=True))
    return Outputs(probs, retain, labels)


def confusable(retain: Tensor, predicted: Tensor, *, gap: float = 0.1, limit: int = 5) -> list[list[int]]:
    """Return, for each row, the rivals whose retain probability stands above the rest, most confusable first.

    The rivals of the predicted class are sorted by rho; those above the widest step between two neighbours stand out,
    if that step is at least ``gap`` and no more than ``limit`` classes lie above it. An easy example has none. With two
    classes, the rival is confusable where its rho is at least 1/2.

    >>> rho = torch.tensor([[0.78, 0.55, 0.22, 0.25], [0.78, 0.24, 0.22, 0.25]])
    >>> confusable(rho, torch.tensor([0, 0]))
    [[1], []]
    """
    rivals = retain.scatter(-1, predicted.unsqueeze(-1), -1.0)
    top = rivals.topk(min(limit + 1, retain.shape[-1] - 1), dim=-1)
    if top.values.shape[-1] == 1:  # a single rival has no rest to stand above
        return [
            [k] if value >= 0.5 else []
            for (k,), (value,) in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
    widest, place = (top.values[:, :-1] - top.values[:, 1:]).max(-1)
    return [
        indices[: position + 1] if width >= gap else []
        for indices, position, width in zip(top.indices.tolist(), place.tolist(), widest.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class Measurement:
    """The objective and its terms over a split, what the masks look like, and the metrics of the mean prediction."""

    loss: dict[str, float]
    masks: dict[str, float]
    metrics: dict[str, float]


@torch.no_grad()
def measure(model: Classifier, batches: Iterable[tuple[Tensor, Tensor]], *, seed: int = 0) -> Measurement:
    """Measure loss terms, masks and metrics over batches, in evaluation mode.

    The masks in the loss are drawn from a generator of their own, so that measuring does not change training.

    >>> from torch import nn
    >>> from dropmax import DropMax
    >>> model = Classifier(nn.Identity(), DropMax(4, 3))
    >>> found = measure(model, [(torch.randn(5, 4), torch.zeros(5, dtype=torch.long))])
    >>> sorted(found.loss), sorted(found.masks)  # doctest: +NORMALIZE_WHITESPACE
    (['auxiliary', 'cross_entropy', 'entropy', 'kl', 'total'],
     ['posterior_rivals', 'retain_rivals', 'retain_target'])
    """
    was_training = model.training
    model.eval()
    head = model.head
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, float] = {}
    probs, labels = [], []
    for x, y in batches:
        features = model.net(x)
        n = len(y)
        shape = head.noise_shape(n)
        noise = None if shape is None else torch.rand(shape, generator=generator).to(features.device)
        loss = head.loss(features, y, noise=noise)
        rho, q = head.retain_probs(features), head.posterior_probs(features, y)
        on_target = rho.gather(-1, y[:, None]).squeeze(-1)
        rivals = head.num_classes - 1
        values = {
            "total": loss.total,
            **loss.terms,
            "retain_target": on_target.mean(),
            "retain_rivals": ((rho.sum(-1) - on_target) / rivals).mean(),
            "posterior_rivals": ((q.sum(-1) - 1) / rivals).mean(),
        }
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + n * float(value)
        probs.append(head.predict_proba(features).cpu())
        labels.append(y.cpu())
    model.train(was_training)
    count = sum(len(y) for y in labels)
    means = {name: value / count for name, value in sums.items()}
    masks = {name: means.pop(name) for name in ("retain_target", "retain_rivals", "posterior_rivals")}
    p, y = torch.cat(probs), torch.cat(labels)
    return Measurement(means, masks, {"error": metrics.error(p, y), "nll": metrics.nll(p, y), "ece": metrics.ece(p, y)})
