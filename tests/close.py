"""How close two floating-point results must be: a bound from the dtype, the length of the sums and the magnitudes.

Two processors, thread counts or memory alignments add the same numbers in different orders. Each of the ``terms``
additions rounds by at most half an ulp of the partial sum, and the roundings are independent, so that the results
differ by about ``eps * sqrt(terms) * scale``. ``SAFETY`` covers the largest of many elements and the few ulps of exp
and log. Compare bit by bit only where the library promises it: on one machine with one thread count, after a resume,
or where numbers are copied and not computed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

SAFETY = 8


def tolerance(dtype: torch.dtype, *, terms: int = 1, scale: float = 1.0) -> float:
    """Return how far apart two sums of ``terms`` numbers may be that reach ``scale`` on the way."""
    return SAFETY * torch.finfo(dtype).eps * math.sqrt(terms) * scale


def close(actual: Any, expected: Any, *, terms: int = 1, scale: float | None = None, what: str = "") -> None:
    """Assert that two tensors, arrays or numbers are the same up to rounding in the coarser of their dtypes.

    ``terms`` is the number of additions behind one element (the sums of consecutive layers add up); ``scale`` the
    largest magnitude on the way, by default the largest expected value. Give it where terms cancel, or where an
    error in logits of that size reaches the result.
    """
    actual, expected = _tensor(actual), _tensor(expected)
    dtype = max(actual.dtype, expected.dtype, key=lambda one: torch.finfo(one).eps)
    if scale is None:
        finite = expected[expected.isfinite()].abs()
        scale = float(finite.max()) if finite.numel() else 0.0
    atol = tolerance(dtype, terms=terms, scale=scale)
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        rtol=0,
        atol=atol,
        equal_nan=True,
        msg=lambda text: (
            f"{what or 'results'} differ by more than rounding ({terms} terms of size {scale:.3g}): {text}"
        ),
    )


def _tensor(x: Any) -> torch.Tensor:
    """Return ``x`` as a tensor; a plain number counts as float64."""
    if isinstance(x, torch.Tensor):
        return x.detach()
    return torch.as_tensor(np.asarray(x, dtype=None if isinstance(x, np.ndarray) else np.float64))
