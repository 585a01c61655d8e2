"""Gradients of dropmax.exact against enumeration, and under torch.func and torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dropmax import exact
from dropmax.errors import InvalidValue
from tests.exact.naive import (
    all_functions,
    draw,
    dtypes,
)


@pytest.mark.parametrize("index", range(5))
def test_gradcheck(index: int) -> None:
    logits, retain_logits, target = draw(5, (2, 3, 5), 3.0, 2.0, torch.float64)
    function, _ = all_functions(target)[index]
    assert torch.autograd.gradcheck(function, (logits.requires_grad_(), retain_logits.requires_grad_()))


@dtypes
@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize(
    ("spread", "retain"),
    [(0, 0), (3, 2), (50, 20), (3, 20), (1e4, 5), (1e4, 20), (3, 100), (1e4, 50), (1e4, 100)],
)
def test_gradient_of_the_sum_over_masks(dtype: torch.dtype, index: int, spread: float, retain: float) -> None:
    logits, retain_logits, target = draw(6, (20, 6), spread, retain, dtype)
    function, naive = all_functions(target)[index]
    weights = torch.randn_like(naive(logits, retain_logits))
    gradients = []
    for f, to in ((function, dtype), (naive, torch.float64)):
        inputs = [tensor.to(to, copy=True).requires_grad_() for tensor in (logits, retain_logits)]
        gradients.append(torch.autograd.grad((f(*inputs) * weights).sum(), inputs))
    for actual, expected in zip(*gradients, strict=True):
        error = (actual.double() - expected).abs() / expected.abs().clamp_min(1)
        assert float(error.max()) < {torch.float32: 1e-5, torch.float64: 3e-9}[dtype]


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("spread", [5.0, 20.0, 200.0])
def test_a_row_alone_has_the_gradient_of_the_sum_over_masks(index: int, spread: float) -> None:
    """Among others a row is walked as far as the farthest of them needs; alone, only as far as it needs itself."""
    logits, retain_logits, target = draw(7, (12, 6), spread, 3.0, torch.float64)
    weights = torch.randn(12, 6, dtype=torch.float64)
    for row in (slice(k, k + 1) for k in range(12)):
        gradients = []
        for function in all_functions(target[row])[index]:
            inputs = [x[row].clone().requires_grad_() for x in (logits, retain_logits)]
            found = function(*inputs)
            weight = weights[row] if found.dim() == 2 else weights[row, 0]
            gradients.append(torch.autograd.grad((found * weight).sum(), inputs))
        for actual, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(actual, expected, rtol=3e-9, atol=3e-9)


@dtypes
@given(seed=st.integers(0, 2**32), scale=st.sampled_from([1.0, 100.0, 1e4, 1e30]))
def test_everything_is_finite(dtype: torch.dtype, seed: int, scale: float) -> None:
    logits, retain_logits, target = draw(seed, (3, 8), scale, min(scale, 1e3), dtype)
    logits[0, :3] = torch.finfo(dtype).min / 4  # how masked-out classes are often written
    for function, _ in all_functions(target):
        inputs = logits.clone().requires_grad_(), retain_logits.clone().requires_grad_()
        value = function(*inputs)
        assert bool(value.isfinite().all())
        for gradient in torch.autograd.grad(value.sum(), inputs):
            assert bool(gradient.isfinite().all())


def test_where_nobody_looks_a_row_of_nan_stays_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "check_finite", lambda *arguments, **options: None)  # as on an accelerator
    logits, retain_logits, target = draw(6, (4, 6), 200.0, 50.0, torch.float32)
    for spoilt in (logits, retain_logits):
        for function, _ in all_functions(target):
            expected = function(logits, retain_logits)
            number, spoilt[1, 2] = spoilt[1, 2].clone(), torch.nan
            value = function(logits, retain_logits)
            spoilt[1, 2] = number
            assert bool(value[1].isnan().any())
            torch.testing.assert_close(value[[0, 2, 3]], expected[[0, 2, 3]], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("index", range(5))
def test_only_one_of_the_inputs_needs_a_gradient(index: int) -> None:
    logits, retain_logits, target = draw(7, (3, 4), 3.0, 2.0, torch.float64)
    function, _ = all_functions(target)[index]
    both = [logits.clone().requires_grad_(), retain_logits.clone().requires_grad_()]
    expected = torch.autograd.grad(function(*both).sum(), both)
    for i in range(2):
        inputs = [logits, retain_logits]
        inputs[i] = inputs[i].clone().requires_grad_()
        torch.testing.assert_close(torch.autograd.grad(function(*inputs).sum(), inputs[i])[0], expected[i])


@pytest.mark.parametrize("index", range(5))
def test_second_derivatives_are_refused(index: int) -> None:
    logits, retain_logits, target = draw(7, (3, 4), 3.0, 2.0, torch.float64)
    function, _ = all_functions(target)[index]
    (gradient,) = torch.autograd.grad(
        function(logits.requires_grad_(), retain_logits).square().sum(), logits, create_graph=True
    )
    with pytest.raises(InvalidValue, match="first derivatives only"):
        gradient.sum().backward()


@pytest.mark.parametrize("function", [exact.predictive, exact.variance])
def test_function_transforms_per_class(function: Callable[..., Tensor]) -> None:
    logits, retain_logits, _ = draw(8, (4, 5), 3.0, 2.0, torch.float64)
    torch.testing.assert_close(torch.vmap(function)(logits, retain_logits), function(logits, retain_logits))
    one_for_all = torch.vmap(function, in_dims=(0, None))(logits, retain_logits[0])
    torch.testing.assert_close(one_for_all, function(logits, retain_logits[:1].expand(4, -1)))
    jacobian = torch.vmap(torch.func.jacrev(function))(logits, retain_logits)
    expected = [
        torch.autograd.functional.jacobian(lambda o, a=a: function(o, a), o)
        for o, a in zip(logits, retain_logits, strict=True)
    ]
    torch.testing.assert_close(jacobian, torch.stack(expected))


@pytest.mark.parametrize("function", [exact.log_marginal, exact.expected_nll, exact.posterior])
def test_function_transforms_of_a_target(function: Callable[..., Tensor]) -> None:
    logits, retain_logits, target = draw(8, (4, 3, 5), 3.0, 2.0, torch.float64)
    mapped = torch.vmap(function, in_dims=(1, 1, 1), out_dims=1)(logits, retain_logits, target)
    torch.testing.assert_close(mapped, function(logits, retain_logits, target))

    def loss(o: Tensor, a: Tensor, t: Tensor) -> Tensor:
        return function(o, a, t).square().sum()

    per_sample = torch.vmap(torch.func.grad(loss, (0, 1)))(logits, retain_logits, target)
    inputs = logits.requires_grad_(), retain_logits.requires_grad_()
    torch.testing.assert_close(per_sample, torch.autograd.grad(loss(*inputs, target), inputs))


@pytest.mark.parametrize("index", range(5))
def test_compiles_in_one_graph(index: int) -> None:
    logits, retain_logits, target = draw(9, (4, 5), 3.0, 2.0, torch.float32)
    function, _ = all_functions(target)[index]

    def loss(o: Tensor, a: Tensor) -> Tensor:
        return function(2 * o, a).square().sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    inputs = logits.requires_grad_(), retain_logits.requires_grad_()
    torch.testing.assert_close(compiled(*inputs), loss(*inputs))
    torch.testing.assert_close(
        torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(loss(*inputs), inputs)
    )
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), loss(*inputs))
