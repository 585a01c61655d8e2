"""Predictions for many classes: the best few of each row, in memory of size batch x block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropmax.blocked import choose_block

__all__ = ["TopK"]

#: Predictions hold about this many numbers at a time, beside what they return.
BLOCK_NUMBERS = 2**22


class TopK(NamedTuple):
    """The k most probable classes of each row, best first.

    >>> TopK._fields
    ('values', 'indices')
    """

    values: Tensor
    indices: Tensor


def row_blocks(num_rows: int, num_classes: int) -> Iterator[slice]:
    """Yield blocks of rows of about BLOCK_NUMBERS numbers.

    >>> list(row_blocks(5, 2**21))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, BLOCK_NUMBERS // max(1, num_classes))
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))


def class_blocks(num_rows: int, num_classes: int) -> Iterator[slice]:
    """Yield the blocks of classes that the blocked loss would use.

    >>> list(class_blocks(4, 10))
    [slice(0, 10, None)]
    """
    size = choose_block(num_rows, num_classes)
    return (slice(start, min(start + size, num_classes)) for start in range(0, num_classes, size))


def linear_part(linear: nn.Linear, rows: Tensor, here: slice) -> Tensor:
    """Return some of the outputs of a linear map.

    >>> linear_part(nn.Linear(4, 9), torch.zeros(2, 4), slice(3, 5)).shape
    torch.Size([2, 2])
    """
    return F.linear(rows, linear.weight[here], None if linear.bias is None else linear.bias[here])


def streamed_topk(
    logits_of: Callable[[slice], Tensor], num_rows: int, num_classes: int, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k largest logits of each row, their classes, and the log-sum-exp of all, block by block.

    >>> logits = torch.tensor([[1.0, 3.0, 2.0]])
    >>> values, indices, normaliser = streamed_topk(lambda here: logits[:, here], 1, 3, 2)
    >>> indices, (values - normaliser[:, None]).exp()
    (tensor([[1, 2]]), tensor([[0.6652, 0.2447]]))
    """
    values = indices = normaliser = None
    for here in class_blocks(num_rows, num_classes):
        logits = logits_of(here)
        best, where = logits.topk(min(k, logits.shape[-1]))
        where = where + here.start
        total = logits.logsumexp(-1)
        if values is None or indices is None or normaliser is None:
            values, indices, normaliser = best, where, total
            continue
        normaliser = torch.logaddexp(normaliser, total)
        values, indices = merge(torch.cat((values, best), -1), torch.cat((indices, where), -1), k)
    if values is None or indices is None or normaliser is None:
        raise ValueError("there are no classes")
    return values, indices, normaliser


def merge(values: Tensor, indices: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of some candidates, and which they are.

    >>> merge(torch.tensor([[1.0, 5.0, 3.0]]), torch.tensor([[10, 20, 30]]), 2)
    (tensor([[5., 3.]]), tensor([[20, 30]]))
    """
    values, order = values.topk(min(k, values.shape[-1]))
    return values, indices.gather(-1, order)
