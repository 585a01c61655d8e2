"""Uniform noise that any block of classes can compute for itself: the number of (row, class) is a hash of two words.

``torch.rand`` hands out numbers in the order they are asked for, so a block of classes cannot ask for *its* part again.
Here every row and every class draws one random 32-bit word, and each number is a hash of the sum of two words. Whoever
needs a part of the noise computes that part: a block of classes, the same block once more in the backward pass, or one
rank of many that share the classes between them. The hash is a few 32-bit integer operations, which a compiler fuses
into whatever uses the noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["combine", "draw_words", "uniform"]

#: Multipliers of the "lowbias32" mixing function (found by search by C. Wellons), as signed 32-bit numbers.
_MIX_1, _MIX_2 = 0x7FEB352D, 0x846CA68B - 2**32

#: Numbers are odd multiples of 2**-24: 23 bits, never 0 or 1, symmetric about 1/2, and exact in float32.
_BITS = 23

#: The bits of the float32 number 1.5, the middle of [1, 2).
_ONE_AND_A_HALF = 0x3FC00000


def draw_words(count: int, device: torch.device | str = "cpu", generator: torch.Generator | None = None) -> Tensor:
    """Return random 32-bit words, of the rows first and then of all classes; from torch's global generator by default.

    >>> draw_words(3 + 10).dtype
    torch.int32
    """
    return torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32, device=device, generator=generator)


def uniform(words: Tensor, num_rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return uniform numbers in (0, 1) for all rows and classes, shape ``(num_rows, len(words) - num_rows)``.

    Numbers of different rows or of different classes are independent whatever the hash does, as their words are; the
    hash takes care of more than two at a time.

    >>> uniform(draw_words(3 + 10), 3).shape
    torch.Size([3, 10])
    """
    return combine(words[:num_rows, None], words[num_rows:], dtype)


def combine(by_row: Tensor, by_class: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Mix the words of rows (..., N, 1) and of classes (K,) into (..., N, K) uniform numbers in (0, 1).

    >>> words = draw_words(3 + 10)
    >>> part = combine(words[:3, None], words[3 + 4 : 3 + 9])  # five of the ten classes
    >>> torch.equal(part, uniform(words, 3)[:, 4:9])
    True
    """
    x = by_row + by_class
    shifted = x >> 16
    # torch shifts copy the sign: the masks make them plain shifts.
    x.bitwise_xor_(shifted.bitwise_and_(0xFFFF)).mul_(_MIX_1)
    if torch.compiler.is_compiling():  # which needs no memory for what stands between
        x = (x ^ ((x >> 15) & 0x1FFFF)) * _MIX_2
        return (x >> (32 - _BITS)).to(dtype) * 2.0**-_BITS + (0.5 + 2.0 ** -(_BITS + 1))
    torch.bitwise_right_shift(x, 15, out=shifted)
    x.bitwise_xor_(shifted.bitwise_and_(0x1FFFF)).mul_(_MIX_2)  # a last shift would change bits that go unused
    # As the digits of a float, the upper 23 bits are a number in [1, 2): no conversion, and no more memory.
    x.bitwise_right_shift_(32 - _BITS).add_(_ONE_AND_A_HALF)
    return x.view(torch.float32).sub_(1 - 2.0 ** -(_BITS + 1)).to(dtype)
