"""What :meth:`dropmax.Head.loss` returns, and how the losses of rows become that of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

#: How the losses of rows are joined.
REDUCTIONS = ("mean", "sum", "none")


class Loss(NamedTuple):
    """What :meth:`Head.loss` returns: the number to minimise, and the terms it is made of.

    Every term is reported before its weight and sign: ``entropy`` is subtracted in ``total``. The terms are values for
    a log. They have no gradient, and are computed on first access. To differentiate one of them, call the head's
    hooks: ``head.terms(head.logits(rows), target, noise)``.

    >>> from dropmax import DropMax
    >>> head = DropMax(in_features=2, num_classes=3)
    >>> total, terms = head.loss(torch.zeros(1, 2), torch.tensor([0]))
    >>> sorted(terms)
    ['auxiliary', 'cross_entropy', 'entropy', 'kl']
    """

    total: Tensor
    terms: Mapping[str, Tensor]


class RowLosses(NamedTuple):
    """The loss of each of N rows, and the names and values of its terms, all of them times the class weights."""

    total: Tensor
    names: tuple[str, ...]
    terms: Callable[[], Mapping[str, Tensor]]

    def reduced(self, weight: Tensor | None, counts: Tensor | None, reduction: str, shape: torch.Size) -> Loss:
        """Return the loss of the batch: the weighted mean or sum over the rows that count, or one number per row.

        Args:
            weight: of each row, 0 where it does not count; None: 1.
            counts: which rows count; None: all do.
            reduction: one of :data:`REDUCTIONS`.
            shape: of the batch.
        """
        total = self.total
        size: Tensor | None = None
        if weight is not None and reduction == "mean":
            size = weight.to(total.dtype).sum().clamp_min(torch.finfo(total.dtype).tiny)

        def reduce(rows: Tensor) -> Tensor:
            rows = rows if counts is None else rows * counts
            if reduction == "none":
                return rows.reshape(shape)
            # Nothing to average over gives 0 with a zero gradient, never 0/0.
            if reduction == "sum" or not rows.shape[0]:
                return rows.sum()
            return rows.mean() if size is None else rows.sum() / size

        def terms() -> dict[str, Tensor]:
            with torch.no_grad():
                return {name: reduce(rows) for name, rows in self.terms().items()}

        # A compiler drops unused values, and cannot return a promise.
        return Loss(reduce(total), terms() if torch.compiler.is_compiling() else Terms(self.names, terms))


def expected_losses(
    row_losses: Callable[[Tensor, Tensor, Tensor | None], RowLosses], rows: Tensor, soft: Tensor, noise: Tensor | None
) -> RowLosses:
    """Return ``sum_k soft[n, k] loss(rows[n], k)`` for each row n: one evaluation for each label that is not 0.

    Args:
        row_losses: the losses of rows, given their hard labels and noise.
        rows: ``(N, d)``.
        soft: ``(N, K)``.
        noise: ``(..., N, K)``, the same for all labels of a row.

    >>> def squares(rows, labels, noise):
    ...     return RowLosses(labels.double() ** 2, ("square",), lambda: {"square": labels.double() ** 2})
    >>> expected_losses(squares, torch.zeros(1, 4), torch.tensor([[0.25, 0.0, 0.75]]), None).total
    tensor([3.], dtype=torch.float64)
    """
    row, label = soft.nonzero(as_tuple=True)
    found = row_losses(rows[row], label, None if noise is None else noise[..., row, :])
    weight = soft[row, label]

    def over_labels(losses: Tensor) -> Tensor:
        return losses.new_zeros(len(rows)).index_add(0, row, losses * weight.to(losses.dtype))

    return RowLosses(
        over_labels(found.total), found.names, lambda: {k: over_labels(x) for k, x in found.terms().items()}
    )


class Terms(Mapping[str, Tensor]):
    """A dictionary of terms that computes its values on first access.

    >>> terms = Terms(("kl",), lambda: {"kl": torch.tensor(2.0)})
    >>> list(terms), terms["kl"]
    (['kl'], tensor(2.))
    """

    def __init__(self, names: tuple[str, ...], compute: Callable[[], Mapping[str, Tensor]]) -> None:
        self._names = names
        self._compute: Callable[[], Mapping[str, Tensor]] | None = compute
        self._values: Mapping[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if self._compute is not None:
            self._values, self._compute = self._compute(), None  # and let go of the tensors it holds
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return repr(dict(self))
