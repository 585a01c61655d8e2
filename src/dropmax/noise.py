"""Uniform noise by counting: the number of (row, class) depends on nothing but a seed.

``torch.rand`` hands out numbers in the order they are asked for, so a block of classes cannot ask for *its* part again.
Here each number is a hash of (seed, row, class). Whoever needs a part of the noise computes that part: a block of
classes, the same block once more in the backward pass, or one rank of many that share the classes between them. The
hash is a few 32-bit integer operations, which a compiler fuses into whatever uses the noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["combine", "draw_seed", "hashes", "uniform"]

#: Multipliers of the "lowbias32" mixing function (found by search by C. Wellons), as signed 32-bit numbers.
_MIX_1, _MIX_2 = 0x7FEB352D, 0x846CA68B - 2**32

#: Numbers are odd multiples of 2**-24: 23 bits, never 0 or 1, symmetric about 1/2, and exact in float32.
_BITS = 23


def draw_seed(device: torch.device | str = "cpu") -> Tensor:
    """Return a seed drawn from torch's global generator; it stays on the device, without a synchronisation.

    >>> draw_seed().shape
    torch.Size([2])
    """
    return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int64, device=device).to(torch.int32)


def uniform(
    seed: Tensor, num_rows: int, first_class: int, num_classes: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return uniform numbers in (0, 1) for the given rows and classes, shape ``(num_rows, num_classes)``.

    Numbers of different rows and different classes are independent whatever the hash does, as they start from
    independent hashes of the row and of the class; the hash takes care of more than two at a time.

    >>> seed = draw_seed()
    >>> whole = uniform(seed, 3, 0, 10)
    >>> torch.equal(uniform(seed, 3, 4, 5), whole[:, 4:9])
    True
    """
    return combine(*hashes(seed, num_rows, first_class, num_classes), dtype)


def hashes(seed: Tensor, num_rows: int, first_class: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the hashes of the rows, (num_rows, 1), and of the classes, (num_classes,): cheap, as nothing is 2-d yet.

    >>> [tuple(x.shape) for x in hashes(draw_seed(), 3, 0, 10)]
    [(3, 1), (10,)]
    """
    rows = torch.arange(num_rows, dtype=torch.int32, device=seed.device)
    classes = torch.arange(first_class, first_class + num_classes, dtype=torch.int32, device=seed.device)
    by_row = _mixed(_mixed(rows.add_(seed[0])).bitwise_xor_(seed[1]))
    return by_row.unsqueeze_(-1), _mixed(_mixed(classes.add_(seed[1])).add_(seed[0]))


def combine(by_row: Tensor, by_class: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Mix the hashes of rows (..., N, 1) and of classes (K,) into (..., N, K) uniform numbers in (0, 1).

    >>> combine(*hashes(draw_seed(), 3, 0, 10)).shape
    torch.Size([3, 10])
    """
    bits = _mixed(by_row + by_class, last_shift=False).bitwise_right_shift_(32 - _BITS)
    return bits.to(dtype).mul_(2.0**-_BITS).add_(0.5 + 2.0 ** -(_BITS + 1))


def _mixed(x: Tensor, last_shift: bool = True) -> Tensor:
    """Scramble 32-bit numbers in place, one to one. torch shifts copy the sign: the masks make them plain shifts."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_MIX_1)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_MIX_2)
    # The top bits, all that combine() uses, are done already.
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)) if last_shift else x
