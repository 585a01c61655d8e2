"""``torch.compile(fullgraph=True)`` of everything a head does, in every mode, against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dropmax import HEADS, Head, make_head
from dropmax.heads import FURTHER

Call = Callable[[Tensor, Tensor], dict[str, Tensor]]


def everything(head: Head) -> Call:
    """All that a head answers, as one function for the compiler to take whole."""
    noise = noise_for(head)
    return lambda h, y: {
        "forward": head(h),
        "mean": head.predict_proba(h, "mean"),
        "mc": head.predict_proba(h, "mc", samples=7),
        "exact": head.predict_proba(h, "exact"),
        "std": head.predictive_std(h),
        "retain": head.retain_probs(h),
        "posterior": head.posterior_probs(h, y),
        "loss": head.loss(h, y, noise=noise).total,
    }


def noise_for(head: Head) -> Tensor | None:
    """The noise of a loss, from outside: a compiled step hashes its own where an eager one asks the generator."""
    shape = head.noise_shape(4)
    return None if shape is None else torch.rand(shape)


def check(head: Head, call: Call) -> None:
    torch._dynamo.reset()
    features, target = torch.randn(4, 6), torch.randint(5, (4,))
    # "aot_eager" traces forward and backward whole, as Inductor would, and skips its slow code generation.
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = []
    for function in (call, compiled):
        torch.manual_seed(1)  # masks are drawn anew in each call: the same ones
        found = function(features, target)
        gradients = torch.autograd.grad(found["loss"], list(head.parameters()), allow_unused=True)
        results.append((found, [gradient for gradient in gradients if gradient is not None]))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("name", [*HEADS, *FURTHER])
def test_every_head_in_every_mode(name: str) -> None:
    head = make_head(name, 6, 5).eval()  # a head with state would change between two calls
    check(head, everything(head))
    features, target = torch.randn(4, 6), torch.randint(5, (4,))
    drawn = torch.compile(lambda: head.loss(features, target).total, fullgraph=True, backend="aot_eager")
    assert drawn().isfinite()  # with noise of its own


@pytest.mark.inductor
def test_dropmax_compiles_with_inductor() -> None:
    torch._dynamo.reset()
    head = make_head("dropmax", 6, 5)
    features, target, noise = torch.randn(4, 6), torch.randint(5, (4,)), torch.rand(4, 5)
    compiled = torch.compile(lambda *a: head.loss(a[0], a[1], noise=a[2]).total, fullgraph=True)
    torch.testing.assert_close(compiled(features, target, noise), head.loss(features, target, noise=noise).total)


@pytest.mark.parametrize(
    "options", [{"likelihood": "marginal"}, {"likelihood": "exact"}, {"samples": 3}, {"label_smoothing": 0.1}], ids=str
)
def test_every_likelihood_of_dropmax(options: dict[str, object]) -> None:
    head = make_head("dropmax", 6, 5, **options)
    noise = noise_for(head)
    check(head, lambda h, y: {"loss": head.loss(h, y, noise=noise).total})
