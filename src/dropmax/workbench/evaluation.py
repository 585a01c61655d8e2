"""What a model says about inputs, and how good that is.

:func:`predict` is the one path from inputs to answers: the command line, the explorer, figures, reports and the
estimator all use it, or :func:`answer` where they have feature vectors already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dropmax import metrics
from dropmax.classifier import Classifier
from dropmax.heads import Head
from dropmax.topk import TopK

__all__ = ["Measurement", "Outputs", "answer", "confusable", "measure", "predict"]


def _no_labels() -> Tensor:
    return torch.empty(0, dtype=torch.long)


@dataclass(frozen=True)
class Outputs:
    """Answers of a model, one row per example.

    >>> outputs = Outputs(torch.tensor([[0.7, 0.1, 0.2]]), torch.tensor([[0.9, 0.1, 0.8]]))
    >>> outputs.predicted.tolist(), outputs.top(2).indices.tolist(), outputs.confusable()
    ([0], [[0, 2]], [[2]])
    """

    probs: Tensor  #: class probabilities (n, K)
    retain: Tensor  #: retain probabilities rho (n, K); ones for a head without masks
    labels: Tensor = field(default_factory=_no_labels)  #: the labels that came with the inputs; empty without any
    std: Tensor | None = None  #: standard deviation of ``probs`` over the masks (n, K), where asked for

    @property
    def predicted(self) -> Tensor:
        """The most probable class of each row."""
        return self.probs.argmax(-1)

    def top(self, k: int) -> TopK:
        """Return the k most probable classes of each row, or all of them where there are fewer."""
        return TopK(*self.probs.topk(min(k, self.probs.shape[-1]), dim=-1))

    def confusable(self, *, gap: float = 0.1, limit: int = 5) -> list[list[int]]:
        """Return what each row may be confused with, see :func:`confusable`."""
        return confusable(self.retain, self.predicted, gap=gap, limit=limit)


@torch.no_grad()
def answer(
    head: Head,
    features: Tensor,
    *,
    mode: str = "mean",
    samples: int = 100,
    generator: torch.Generator | None = None,
    std: bool = False,
) -> Outputs:
    """Return a head's answers for feature vectors.

    Args:
        head: of the model; a network in front of it must be in evaluation mode.
        features: ``(n, in_features)``.
        mode: ``"mean"``, ``"mc"`` or ``"exact"``, see :meth:`dropmax.Head.predict_proba`.
        samples: masks drawn per row in mode ``"mc"``.
        generator: where mode ``"mc"`` draws them from.
        std: whether to compute the standard deviation over the masks too.

    >>> from dropmax import DropMax
    >>> answer(DropMax(4, 3), torch.randn(5, 4), std=True).std.shape
    torch.Size([5, 3])
    """
    probs = head.predict_proba(features, mode, samples=samples, generator=generator)
    return Outputs(probs, head.retain_probs(features), std=head.predictive_std(features) if std else None)


@torch.no_grad()
def predict(
    model: Classifier,
    batches: Iterable[Tensor | tuple[Tensor, Tensor]],
    *,
    mode: str = "mean",
    samples: int = 100,
    generator: torch.Generator | None = None,
    std: bool = False,
) -> Outputs:
    """Return a model's answers, on the CPU, for batches of inputs or of (inputs, labels).

    The model answers in evaluation mode, and is put back into the mode it was in. The options are those of
    :func:`answer`.

    >>> from torch import nn
    >>> from dropmax import DropMax
    >>> model = Classifier(nn.Identity(), DropMax(4, 3))
    >>> predict(model, [torch.randn(5, 4), torch.randn(2, 4)]).probs.shape
    torch.Size([7, 3])
    >>> predict(model, [(torch.randn(5, 4), torch.zeros(5, dtype=torch.long))]).labels.shape
    torch.Size([5])
    """
    was_training = model.training
    model.eval()
    parts, labels = [], [_no_labels()]
    try:
        for batch in batches:
            x, y = batch if isinstance(batch, (tuple, list)) else (batch, None)
            part = answer(model.head, model.net(x), mode=mode, samples=samples, generator=generator, std=std)
            parts.append((part.probs.cpu(), part.retain.cpu(), *([] if part.std is None else [part.std.cpu()])))
            labels += [] if y is None else [y.cpu()]
    finally:
        model.train(was_training)
    if not parts:
        parts = [(torch.empty(0, model.head.num_classes),) * (3 if std else 2)]
    probs, retain, *deviations = (torch.cat(rows) for rows in zip(*parts, strict=True))
    return Outputs(probs, retain, torch.cat(labels), *deviations)


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
