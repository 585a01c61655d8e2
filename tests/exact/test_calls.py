"""How dropmax.exact is called: shapes, dtypes, nodes, what it costs, and what bad input gets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import Tensor

from dropmax import exact
from dropmax.errors import InvalidType, InvalidValue
from dropmax.exact import quadrature
from dropmax.exact.quadrature import Walk, rule_for
from tests.close import close
from tests.exact.naive import (
    all_functions,
    draw,
    naive_expected_nll,
    naive_predictive,
)


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("batch", [(0,), (0, 3), (), (2, 0)])
def test_batch_shapes(index: int, batch: tuple[int, ...]) -> None:
    logits, retain_logits, target = draw(10, (*batch, 4), 3.0, 2.0, torch.float32)
    function, naive = all_functions(target)[index]
    inputs = logits.requires_grad_(), retain_logits.requires_grad_()
    value = function(*inputs)
    assert value.shape == naive(*inputs).shape
    for gradient, tensor in zip(torch.autograd.grad(value.sum(), inputs), inputs, strict=True):
        assert gradient.shape == tensor.shape


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(index: int, dtype: torch.dtype) -> None:
    logits, retain_logits, target = draw(11, (3, 6), 5.0, 3.0, dtype)
    function, _ = all_functions(target)[index]
    inputs = logits.requires_grad_(), retain_logits.requires_grad_()
    value = function(*inputs)
    assert value.dtype == torch.float32
    close(value, function(logits.float(), retain_logits.float()), terms=100)  # quadrature nodes
    assert [g.dtype for g in torch.autograd.grad(value.sum(), inputs)] == [dtype, dtype]


def test_mixed_dtypes_are_promoted() -> None:
    logits, retain_logits, _ = draw(11, (3, 6), 5.0, 3.0, torch.float32)
    assert exact.predictive(logits.double(), retain_logits).dtype == torch.float64
    assert exact.predictive(logits.half(), retain_logits.bfloat16()).dtype == torch.float32


def test_autocast_and_inference_mode_change_nothing() -> None:
    logits, retain_logits, target = draw(12, (3, 6), 5.0, 3.0, torch.float32)
    for function, _ in all_functions(target):
        expected = function(logits, retain_logits)
        with torch.autocast("cpu", torch.bfloat16):
            close(function(logits, retain_logits), expected, terms=100)
        with torch.inference_mode():
            close(function(logits, retain_logits), expected, terms=100)
        close(function(logits, retain_logits), expected, terms=100)


def test_work_memory_survives_inference_mode() -> None:
    """Tensors made in inference mode may not be written to outside; every thread makes its own when it starts."""
    logits, retain_logits, _ = draw(12, (3, 6), 5.0, 3.0, torch.float32)

    def first_inside_then_outside() -> Tensor:
        with torch.inference_mode():
            exact.predictive(logits, retain_logits)
        return exact.predictive(logits, retain_logits)

    with ThreadPoolExecutor(1) as fresh_thread:
        value = fresh_thread.submit(first_inside_then_outside).result()
    close(value, exact.predictive(logits, retain_logits), terms=100)


@pytest.mark.parametrize("index", range(5))
def test_rows_in_any_order_and_any_strides(index: int) -> None:
    """Rows are worked on in chunks that share their last node: that must not show."""
    logits, retain_logits, target = draw(13, (400, 90), 30.0, 4.0, torch.float64)
    target = target.clone()
    function, _ = all_functions(target)[index]
    value = function(logits, retain_logits)
    rows = [0, 131, 399]
    alone, _ = all_functions(target[rows])[index]
    torch.testing.assert_close(alone(logits[rows], retain_logits[rows]), value[rows], rtol=1e-11, atol=1e-12)
    strided = logits.t().contiguous().t()
    close(function(strided, retain_logits), value, terms=100 * 90, scale=max(1.0, float(value.abs().max())))


@pytest.mark.parametrize("step", [0.1, 0.25, 0.7])
def test_the_error_falls_with_the_distance_of_nodes_as_theory_says(
    step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quadrature, "rule_for", partial(rule_for, step=step))
    logits, retain_logits, target = draw(14, (20, 6), 10.0, 5.0, torch.float64)
    error = (exact.predictive(logits, retain_logits) - naive_predictive(logits, retain_logits)).abs().max()
    assert float(error) < max(1e-13, 30 * float(torch.exp(torch.tensor(-(torch.pi**2) / step))))
    assert step < 0.5 or float(error) > 1e-9
    nll = exact.expected_nll(logits, retain_logits, target)
    torch.testing.assert_close(nll, naive_expected_nll(logits, retain_logits, target), rtol=1e-4, atol=1e-4)


def test_quadrature_weights_are_positive_and_exact() -> None:
    for dtype, tolerance in ((torch.float32, 1e-7), (torch.float64, 1e-12)):
        rule = rule_for(dtype)
        right = [(rule.start + rule.step * j, rule.step) for j in range(100)]
        position, weight = torch.tensor([*rule.left, *right], dtype=torch.float64).T
        assert bool((weight > 0).all())
        x = torch.logspace(-8, 0, 200, dtype=torch.float64)  # 1 = int x exp(-s x) ds for every x up to 1
        integral = (weight * position.exp() * x[:, None] * torch.exp(-position.exp() * x[:, None])).sum(-1)
        torch.testing.assert_close(integral, torch.ones_like(x), rtol=0, atol=tolerance)


def test_wide_spreads_do_not_need_many_nodes() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4, -1e30, -torch.inf]])
    walk = Walk(logits, torch.zeros(1, 5))
    assert len(walk.nodes(slice(0, 1))[0]) < 5 * 48 / 0.5
    torch.testing.assert_close(exact.predictive(logits, torch.zeros(1, 5)).sum(), torch.tensor(1.0))


def test_ten_thousand_classes_need_little_memory() -> None:
    """(128, 10000) floats are 5 MB: a matrix for each of some forty nodes would be more than 200 MB."""
    script = """
import resource, torch
from dropmax import exact
torch.set_num_threads(1)
logits = torch.randn(128, 10_000, requires_grad=True)
retain_logits = torch.randn(128, 10_000, requires_grad=True)
target = torch.randint(10_000, (128,))
exact.predictive(logits[:1], retain_logits[:1]).sum().backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
exact.expected_nll(logits, retain_logits, target).sum().backward()
(exact.predictive(logits, retain_logits) ** 2).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 120  # MB


@pytest.mark.parametrize("index", range(5))
def test_infinities_that_have_a_meaning(index: int) -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0], [0.0, -torch.inf, 1.0], [-torch.inf, 3.0, 3.0], [1.0, 2.0, 3.0]])
    retain_logits = torch.tensor([[torch.inf, 0.0, -torch.inf], [0.0, 1.0, 2.0], [0.0, 0.0, 0.0], [-torch.inf] * 3])
    function, _ = all_functions(torch.tensor([1, 0, 2, 0]))[index]
    inputs = logits.clone().requires_grad_(), retain_logits.clone().requires_grad_()
    value = function(*inputs)
    torch.testing.assert_close(value, function(logits.clamp_min(-(2.0**20)), retain_logits.clamp(-1e4, 1e4)))
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(value.sum(), inputs))


@pytest.mark.parametrize("size", [1e7, 1e20, 1e30])
def test_only_differences_of_huge_logits_matter(size: float) -> None:
    retain_logits = torch.tensor([[0.5, -1.0, 2.0, 0.0]])
    equal = torch.zeros(1, 4)
    for function, _ in all_functions(torch.tensor([2])):
        for sign in (1, -1):
            torch.testing.assert_close(function(equal + sign * size, retain_logits), function(equal, retain_logits))
    mixed = torch.tensor([[size, size, -size, -size]])
    torch.testing.assert_close(exact.predictive(mixed, retain_logits).sum(), torch.tensor(1.0))


# --- error messages --------------------------------------------------------------------------------------------------

GOOD, LABELS = torch.zeros(2, 3), torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: exact.predictive(GOOD, torch.zeros(2, 4)), InvalidValue, r"shape \(2, 3\).*retain_logits.*\(2, 4\)"),
        (lambda: exact.expected_nll(GOOD, GOOD[0], LABELS), InvalidValue, r"\(2, 3\).*posterior_logits.*\(3,\)"),
        (lambda: exact.variance(GOOD.long(), GOOD), InvalidType, r"logits must be floating point, got torch\.int64"),
        (lambda: exact.variance(GOOD, GOOD.bool()), InvalidType, r"retain_logits must be floating point"),
        (lambda: exact.predictive([0.0, 1.0], GOOD), InvalidType, r"logits must be a torch\.Tensor, got list"),
        (lambda: exact.predictive(GOOD[:, :1], GOOD[:, :1]), InvalidValue, r"\(2, 1\).*at least two classes"),
        (lambda: exact.predictive(GOOD[0, 0], GOOD[0, 0]), InvalidValue, r"at least two classes"),
        (lambda: exact.log_marginal(GOOD, GOOD, torch.tensor([0, 3])), InvalidValue, r"label 3.*0\.\.2"),
        (lambda: exact.posterior(GOOD, GOOD, torch.tensor([-1, 0])), InvalidValue, r"label -1.*0\.\.2"),
        (lambda: exact.posterior(GOOD, GOOD, torch.zeros(2)), InvalidType, r"integer class indices.*float32"),
        (lambda: exact.expected_nll(GOOD, GOOD, torch.tensor([0])), InvalidValue, r"target has shape \(1,\).*\(2,\)"),
        (lambda: exact.predictive(GOOD + torch.nan, GOOD), InvalidValue, r"logits hold nan at \[0, 0\]"),
        (lambda: exact.predictive(GOOD + torch.inf, GOOD), InvalidValue, r"logits hold inf"),
        (lambda: exact.variance(GOOD, GOOD * torch.nan), InvalidValue, r"retain_logits hold nan"),
        (lambda: exact.expected_nll(GOOD, GOOD * torch.nan, LABELS), InvalidValue, r"posterior_logits hold nan"),
    ],
)
def test_error_messages(call: Callable[[], Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
