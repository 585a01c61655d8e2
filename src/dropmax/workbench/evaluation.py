"""What a model says about inputs, and how good that is.

:func:`predict` is the one path from inputs to answers: the command line, the explorer, figures, reports and the
estimator all use it, or :func:`answer` where they have feature vectors already. Unless a mode is named, both give *the*
answer of a calibrated model: the mode and temperature that were best on held-out rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dropmax import metrics
from dropmax.calibration import Calibration
from dropmax.classifier import Classifier
from dropmax.heads import Head
from dropmax.topk import TopK

#: Without held-out rows, sets are the fewest classes whose probabilities reach this sum, and nothing is promised.
PLAIN_COVERAGE = 0.95

#: Where no class is likely enough for the set, those of at least this probability are what it could be.
_LEAST = 0.2


_NO_LABELS = torch.empty(0, dtype=torch.long)


@contextmanager
def _evaluating(model: Classifier) -> Iterator[None]:
    """Put a model into evaluation mode, and back into the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class Verdict(NamedTuple):
    """What an input could be: the classes of its prediction set, most probable first, and a state.

    ``state`` is ``"sure"`` (one class), ``"torn"`` (several), or ``"unlike"``: the input is unlike anything the
    model was trained on, whatever classes the set may hold.

    >>> Verdict("torn", (4, 9)).words("0123456789")
    'torn between 4 and 9'
    """

    state: str
    classes: tuple[int, ...]

    def words(self, names: Sequence[str], most: int = 5) -> str:
        """Return the verdict in words, naming at most so many classes.

        >>> Verdict("sure", (4,)).words("0123456789"), Verdict("unlike", ()).words("0123456789")
        ('sure: 4', 'unlike anything it was trained on')
        >>> Verdict("torn", (1, 7, 9)).words("0123456789", most=2)
        'torn between 1, 7 and 1 more'
        """
        if self.state != "torn":
            return f"sure: {names[self.classes[0]]}" if self.state == "sure" else "unlike anything it was trained on"
        shown = [names[k] for k in self.classes[:most]]
        if len(self.classes) > most:
            shown.append(f"{len(self.classes) - most} more")
        return f"torn between {', '.join(shown[:-1])} and {shown[-1]}"


@dataclass(frozen=True)
class Outputs:
    """Answers of a model, one row per example.

    >>> outputs = Outputs(torch.tensor([[0.7, 0.1, 0.2], [0.96, 0.03, 0.01]]), torch.ones(2, 3))
    >>> outputs.predicted.tolist(), outputs.top(2).indices.tolist(), outputs.confusable()
    ([0, 0], [[0, 2], [0, 1]], [[2, 1], []])
    >>> [verdict.state for verdict in outputs.verdicts()]
    ['torn', 'sure']
    """

    probs: Tensor  #: class probabilities (n, K)
    retain: Tensor  #: retain probabilities rho (n, K); ones for a head without masks
    labels: Tensor = _NO_LABELS  #: the labels that came with the inputs; empty without any
    std: Tensor | None = None  #: standard deviation over the masks (n, K), where asked for, before any temperature
    outside: Tensor | None = None  #: by how much an outside score is above its limit (n,), of calibrated answers only
    calibration: Calibration | None = None  #: what ``probs`` were calibrated with

    @classmethod
    def join(cls, parts: Sequence[Outputs]) -> Outputs:
        """Return the rows of all parts, on the CPU."""
        joined: dict[str, Any] = {"calibration": parts[0].calibration}
        for name in ("probs", "retain", "labels", "std", "outside"):
            rows = [getattr(part, name) for part in parts]
            joined[name] = None if rows[0] is None else torch.cat([row.cpu() for row in rows])
        return cls(**joined)

    @property
    def predicted(self) -> Tensor:
        """The most probable class of each row."""
        return self.probs.argmax(-1)

    def top(self, k: int) -> TopK:
        """Return the k most probable classes of each row, or all of them where there are fewer."""
        return TopK(*self.probs.topk(min(k, self.probs.shape[-1]), dim=-1))

    def sets(self, coverage: float | None = None) -> Tensor:
        """Return what each row could be, boolean (n, K): the prediction sets of this coverage, or of the default one.

        Where the set (LAC) is empty, classes of at least 1/5 are put in; if it is still empty, no class fits. Without
        calibration the sets are the fewest classes whose probabilities reach ``coverage`` (0.95): no promise.
        """
        if self.calibration is None or (coverage is None and self.calibration.coverage is None):
            return self._likeliest(PLAIN_COVERAGE if coverage is None else coverage)
        found = self.calibration.sets(self.probs, coverage)
        return found | (~found.any(-1, keepdim=True) & (self.probs >= _LEAST))

    def _likeliest(self, coverage: float) -> Tensor:
        ordered, order = self.probs.double().sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        found = torch.zeros_like(self.probs, dtype=torch.bool).scatter_(-1, order, before < coverage)
        return found & (self.probs.amax(-1, keepdim=True) >= _LEAST)

    def verdicts(self, coverage: float | None = None) -> list[Verdict]:
        """Return what each row could be, in one of three states.

        A row is unlike anything the model was trained on if its set is empty, or if an outside score is above its
        limit, as for at most 1 % of the held-out rows.
        """
        counts = self.sets(coverage).sum(-1)
        order = self.probs.topk(max(1, int(counts.max())) if len(counts) else 1, dim=-1).indices
        strange = torch.zeros_like(counts) if self.outside is None else self.outside > 0
        found = []
        for classes, count, unlike in zip(order.tolist(), counts.tolist(), strange.tolist(), strict=True):
            state = "unlike" if unlike or not count else "sure" if count == 1 else "torn"
            found.append(Verdict(state, tuple(classes[:count])))
        return found

    def confusable(self, *, coverage: float | None = None, limit: int | None = None) -> list[list[int]]:
        """Return what else each row could be: its set without the predicted class, most probable first."""
        return [list(verdict.classes[1:][:limit]) for verdict in self.verdicts(coverage)]


@torch.no_grad()
def answer(
    head: Head,
    features: Tensor,
    *,
    mode: str | None = None,
    samples: int = 100,
    generator: torch.Generator | None = None,
    std: bool = False,
) -> Outputs:
    """Return a head's answers for feature vectors.

    Args:
        head: of the model; a network in front of it must be in evaluation mode.
        features: ``(n, in_features)``.
        mode: ``"mean"``, ``"mc"`` or ``"exact"`` as they come, without a temperature, see
            :meth:`dropmax.Head.predict_proba`. By default the calibrated answer, or ``"mean"`` if the head has not been
            calibrated.
        samples: masks drawn per row in mode ``"mc"``.
        generator: where mode ``"mc"`` draws them from.
        std: whether to compute the standard deviation over the masks too.

    >>> from dropmax import DropMax
    >>> answer(DropMax(4, 3), torch.randn(5, 4), std=True).std.shape
    torch.Size([5, 3])
    """
    calibration = head.calibration if mode is None else None
    probs = head.predict_proba(features, mode, samples=samples, generator=generator, calibrated=calibration is not None)
    deviation = head.predictive_std(features) if std else None
    outside = None
    if calibration is not None and calibration.outside:
        excess = [head.outside_score(features, kind) - limit for kind, limit in calibration.outside.items()]
        outside = torch.stack(excess).amax(0)
    return Outputs(probs, head.retain_probs(features), std=deviation, outside=outside, calibration=calibration)


@torch.no_grad()
def predict(
    model: Classifier,
    batches: Iterable[Tensor | tuple[Tensor, Tensor]],
    *,
    mode: str | None = None,
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
    parts = []
    with _evaluating(model):
        for batch in batches:
            x, y = batch if isinstance(batch, (tuple, list)) else (batch, _NO_LABELS)
            part = answer(model.head, model.net(x), mode=mode, samples=samples, generator=generator, std=std)
            parts.append(Outputs.join([replace(part, labels=y)]))
    if not parts:
        nothing = torch.empty(0, model.head.num_classes)
        parts = [Outputs(nothing, nothing, std=nothing if std else None)]
    return Outputs.join(parts)


@torch.no_grad()
def calibrate(
    model: Classifier,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    by_class: bool = False,
    source: str = "held-out rows",
) -> Calibration | None:
    """Fit temperatures on held-out batches, choose the mode that is the answer, and keep both in ``model.head``.

    With ``by_class``, prediction sets promise their coverage for each class. Without any rows the model stays, or
    becomes, uncalibrated, and None is returned.

    >>> from torch import nn
    >>> from dropmax import DropMax
    >>> model = Classifier(nn.Identity(), DropMax(4, 3))
    >>> sorted(calibrate(model, [(torch.randn(30, 4), torch.randint(3, (30,)))]).temperatures)
    ['exact', 'mean']
    >>> predict(model, [torch.randn(2, 4)]).calibration is model.head.calibration
    True
    """
    with _evaluating(model):
        features = ((model.net(x), y) for x, y in batches)
        return calibrate_head(model.head, features, by_class=by_class, source=source)


@torch.no_grad()
def calibrate_head(
    head: Head, batches: Iterable[tuple[Tensor, Tensor]], *, by_class: bool = False, source: str = "held-out rows"
) -> Calibration | None:
    """Do what :func:`calibrate` does, with batches of feature vectors and labels."""
    probs: dict[str, list[Tensor]] = {"mean": []}
    outside: dict[str, list[Tensor]] = {"energy": []}
    if head.masked:
        probs["exact"] = []
        outside["entropy"] = []  # expected over the masks; it sees noise that the energy does not, but only with masks
    labels = []
    for features, y in batches:
        for mode, rows in probs.items():
            rows.append(head.predict_proba(features, mode).cpu())
        for kind, rows in outside.items():
            rows.append(head.outside_score(features, kind).cpu())
        labels.append(y.cpu())
    head.calibration = None
    if labels:
        head.calibration = Calibration.fit(
            {mode: torch.cat(rows) for mode, rows in probs.items()},
            torch.cat(labels),
            outside={kind: torch.cat(rows) for kind, rows in outside.items()},
            by_class=by_class,
            source=source,
        )
    return head.calibration


def confusions(labels: Tensor, predicted: Tensor, num_classes: int) -> Tensor:
    """Return how many rows of class i were taken for class j, (K, K).

    >>> confusions(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), 2)
    tensor([[1, 1],
            [0, 1]])
    """
    pairs = labels * num_classes + predicted
    return pairs.bincount(minlength=num_classes**2).view(num_classes, num_classes)


def confusable(probs: Tensor, *, coverage: float | None = None, limit: int | None = None) -> list[list[int]]:
    """Return what else each row could be, from probabilities (n, K) alone: see :meth:`Outputs.confusable`.

    >>> confusable(torch.tensor([[0.70, 0.02, 0.28], [0.97, 0.02, 0.01]]))
    [[2], []]
    """
    return Outputs(probs, torch.ones_like(probs)).confusable(coverage=coverage, limit=limit)


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
    head, rivals = model.head, model.head.num_classes - 1
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, float] = {}
    probs, labels = [], []
    with _evaluating(model):
        for x, y in batches:
            features = model.net(x)
            shape = head.noise_shape(len(y))
            noise = None if shape is None else torch.rand(shape, generator=generator).to(features.device)
            loss = head.loss(features, y, noise=noise)
            rho, q = head.retain_probs(features), head.posterior_probs(features, y)
            on_target = rho.gather(-1, y[:, None]).squeeze(-1)
            masks = {
                "retain_target": on_target.mean(),
                "retain_rivals": ((rho.sum(-1) - on_target) / rivals).mean(),
                "posterior_rivals": ((q.sum(-1) - 1) / rivals).mean(),
            }
            for name, value in {"total": loss.total, **loss.terms, **masks}.items():
                sums[name] = sums.get(name, 0.0) + len(y) * float(value)
            probs.append(head.predict_proba(features).cpu())
            labels.append(y.cpu())
    count = sum(map(len, labels))
    means = {name: value / count for name, value in sums.items()}
    looks = {name: means.pop(name) for name in ("retain_target", "retain_rivals", "posterior_rivals")}
    p, y = torch.cat(probs), torch.cat(labels)
    return Measurement(means, looks, {"error": metrics.error(p, y), "nll": metrics.nll(p, y), "ece": metrics.ece(p, y)})
