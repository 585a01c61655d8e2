"""The walk inside a graph against the sum over all masks, and against the kernels where that sum is too long."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dropmax import exact
from dropmax.exact import kernels, portable
from tests.exact.naive import naive_predictive, naive_variance


def logits_of(classes: int, spread: float, retain_spread: float, rows: int = 8) -> tuple[Tensor, Tensor]:
    o = spread * torch.randn(rows, classes, dtype=torch.float64)
    return o, retain_spread * torch.randn(rows, classes, dtype=torch.float64) - 1


def naive(o: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Both moments by going through the masks."""
    mean = naive_predictive(o, a)
    return mean, naive_variance(o, a) + mean.square()


@pytest.mark.parametrize(("spread", "retain_spread"), [(1.0, 1.0), (30.0, 5.0), (1e4, 3.0)])
def test_equals_the_sum_over_masks(spread: float, retain_spread: float) -> None:
    o, a = logits_of(6, spread, retain_spread)
    for found, expected in zip(portable.moments(o, a, 2), naive(o, a), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("classes", "spread"), [(2, 300.0), (100, 5.0), (300, 30.0)])
def test_equals_the_kernels_for_many_classes(classes: int, spread: float) -> None:
    o, a = logits_of(classes, spread, 3.0, rows=4)
    for found, expected in zip(portable.moments(o, a, 2), kernels.moments(o, a, 2), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_only_differences_of_huge_logits_matter() -> None:
    a = torch.tensor([[0.5, -1.0, 2.0]])
    for found, expected in zip(
        portable.moments(torch.full((1, 3), 1e30), a, 2), naive(torch.zeros(1, 3).double(), a.double()), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_a_row_with_nan_or_infinity_does_not_spoil_the_others() -> None:
    o = torch.tensor([[0.0, -torch.inf, 1.0], [torch.nan, 0.0, 0.0], [1.0, 2.0, 3.0]])
    a = torch.zeros(3, 3)
    (found,) = portable.moments(o, a, 1)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[2:].float(), exact.predictive(o[2:], a[2:]))
    torch.testing.assert_close(found[0].sum(), torch.tensor(1.0, dtype=torch.float64))


class Both(nn.Module):
    def forward(self, o: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        return exact.predictive(o, a), exact.variance(o, a)


def test_export_of_exact_functions_is_plain_operations_for_any_batch_size() -> None:
    batch = {0: torch.export.Dim.DYNAMIC}
    program = torch.export.export(Both(), (torch.randn(3, 5), torch.randn(3, 5)), dynamic_shapes=(batch, batch))
    assert "dropmax" not in str(program.graph), "whoever loads the program would need dropmax"
    for rows in (1, 2, 7):
        o, a = 5 * torch.randn(rows, 5), 2 * torch.randn(rows, 5)
        for found, expected in zip(program.module()(o, a), Both()(o, a), strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
