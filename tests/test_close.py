from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.close import close, tolerance


def test_sums_in_another_order_are_close_and_other_numbers_are_not() -> None:
    x = torch.randn(50, 1000)
    close(x[:, torch.randperm(1000)].sum(1), x.sum(1), terms=1000)
    close(x.sum(1), x.double().sum(1), terms=1000)
    close(x.sum(1).numpy(), x.sum(1), terms=1)
    with pytest.raises(AssertionError, match="the sums differ by more than rounding"):
        close(x.sum(1) * (1 + 1e-3), x.sum(1), terms=1000, what="the sums")


def test_the_coarser_dtype_and_the_scale_decide() -> None:
    close(1.0 + 1e-7, torch.tensor(1.0))
    with pytest.raises(AssertionError):
        close(1.0 + 1e-7, 1.0)
    with pytest.raises(AssertionError):
        close(np.array([1e-3]), np.array([0.0]))
    close(np.array([1e-13]), np.array([0.0]), scale=100.0)
    assert tolerance(torch.float32, terms=100, scale=2.0) == pytest.approx(8 * 2**-23 * 10 * 2)


def test_nan_is_close_to_nan_alone() -> None:
    close([float("nan"), float("inf")], [float("nan"), float("inf")])
    with pytest.raises(AssertionError):
        close([float("nan")], [1.0])
