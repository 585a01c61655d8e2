"""What goes into the walk over the classes, and what comes out."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

#: Logits and masks of all blocks are kept for the backward pass where they need no more than this; else computed again.
KEPT_BYTES = 2**26

#: Numbers in a block, if nobody says otherwise. Matrix products want wide blocks; the memory used is about ten such.
BLOCK_NUMBERS = 2**19

#: Narrower blocks make matrix products slow.
LEAST_BLOCK = 256


class Settings(NamedTuple):
    """What the walk needs beside tensors; the options of :class:`dropmax.DropMax` under the same names.

    >>> Settings(block=1024).temperature
    0.1
    """

    block: int  # classes in a block
    keep: bool = False  # keep the blocks for the backward pass instead of computing them again
    temperature: float = 0.1
    epsilon: float = 1e-20
    samples: int = 1
    smooth: bool = False  # also compute what label smoothing needs
    base_rate: float = 0.0  # what the auxiliary loss subtracts from r
    mask_gradient: bool = True
    stop_parameters: bool = False
    first_class: int = 0  # index of the first class here: not 0 on all ranks but one, where ranks share the classes


class RowTerms(NamedTuple):
    """The terms of the objective, one number a row each.

    ``smooth`` is the part of the cross entropy that label smoothing spreads over the retained classes (zeros without).

    >>> RowTerms._fields
    ('nll', 'smooth', 'kl', 'entropy', 'auxiliary')
    """

    nll: Tensor
    smooth: Tensor
    kl: Tensor
    entropy: Tensor
    auxiliary: Tensor


def choose_block(num_rows: int, num_classes: int) -> int:
    """Return a number of classes for a block: as even a split as possible, a multiple of 64 where there are several.

    >>> choose_block(128, 10_000), choose_block(128, 10)
    (3392, 10)
    """
    wanted = max(LEAST_BLOCK, BLOCK_NUMBERS // max(1, num_rows))
    blocks = math.ceil(num_classes / wanted)
    return num_classes if blocks == 1 else math.ceil(num_classes / blocks / 64) * 64
