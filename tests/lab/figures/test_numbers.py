"""The numbers behind the figures, against slow and plain ways to the same."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dropmax import exact
from dropmax.heads.masked import sampled
from dropmax.lab.figures import condition, confusion_graph, noise
from dropmax.lab.figures.profiles import top_and_bottom
from dropmax.lab.figures.runs import Subject
from dropmax.workbench import style
from dropmax.workbench.evaluation import Outputs


def _problem(seed: int, classes: int = 4, rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    o, a = 2 * torch.randn(2, rows, classes, generator=generator, dtype=torch.float64)
    return o, a, torch.randint(classes, (rows,), generator=generator)


@given(st.integers(0, 10_000))
def test_left_side_of_the_inequality_is_as_printed(seed: int) -> None:
    o, a, y = _problem(seed)
    rho = a.sigmoid()
    found = condition.measure(o, a, rho, y)
    rows = torch.arange(len(y))
    weighted = rho * o.exp()
    printed = weighted[rows, y] / weighted.sum(-1) - o.exp()[rows, y] / o.exp().sum(-1)
    torch.testing.assert_close(found.left_side, printed)
    for i in range(len(y)):
        rivals = [float(rho[i, k]) for k in range(4) if k != int(y[i])]
        assert bool(found.met[i]) == (float(rho[i, y[i]]) > max(rivals))
        assert float(found.spread[i]) == pytest.approx(max(rivals) - min(rivals))
    assert bool((found.left_side[found.met] > 0).all())  # Condition 1, and more than it asks for


@given(st.integers(0, 10_000))
def test_gradient_ratios_are_those_of_enumerated_losses(seed: int) -> None:
    o, a, y = _problem(seed, rows=2)
    q = torch.rand(o.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = condition.measure(o, a, q, y)
    for i, t in enumerate(y.tolist()):
        under_p = _gradient(o[i], a[i].sigmoid(), t) / _gradient(o[i], torch.ones(4).double(), t)
        kept = q[i].clone()
        kept[t] = 1.0
        under_q = _gradient(o[i], kept, t) / _gradient(o[i], torch.ones(4).double(), t)
        assert float(found.under_p[i]) == pytest.approx(float(under_p), rel=1e-4)
        assert float(found.under_q[i]) == pytest.approx(float(under_q), rel=1e-4)


def _gradient(o: Tensor, retain: Tensor, target: int) -> Tensor:
    """|d/do_t| of the expected -log p(t | z), by autograd over all masks."""
    o = o.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for mask in itertools.product([0.0, 1.0], repeat=len(o)):
        z = torch.tensor(mask, dtype=torch.float64)
        weight = torch.where(z == 1, retain, 1 - retain).prod()
        total = total - weight * torch.log_softmax(o + torch.log(z + 1e-20), -1)[target]
    (gradient,) = torch.autograd.grad(total, o)
    return gradient[target].abs()


@given(st.integers(0, 10_000), st.integers(0, 3))
def test_keeping_the_target_puts_rho_in_place_of_its_mask(seed: int, target: int) -> None:
    o, a, _ = _problem(seed, rows=1)
    rho = a.sigmoid()
    expected = 0.0
    for mask in itertools.product([0.0, 1.0], repeat=4):
        if mask[target] == 0.0:
            continue  # the target's mask is no longer random
        z = torch.tensor(mask, dtype=torch.float64)
        weight = torch.where(z == 1, rho[0], 1 - rho[0])
        weight[target] = 1.0
        z[target] = rho[0, target]
        expected += float(weight.prod() * (z[target] * o[0, target].exp()) / (z * o[0].exp()).sum())
    found = exact.predictive(*noise.keep_the_target(o, a, torch.tensor([target])))
    assert float(found[0, target]) == pytest.approx(expected, abs=1e-6)


def test_samples_average_to_the_exact_prediction() -> None:
    o, a, _ = _problem(3, rows=3)
    generator = torch.Generator().manual_seed(0)
    kept, probs = sampled(o, a.sigmoid(), 20_000, generator)
    torch.testing.assert_close(kept.double().mean(0), a.sigmoid(), atol=0.02, rtol=0)
    torch.testing.assert_close(probs.mean(0), exact.predictive(o, a), atol=0.02, rtol=0)
    torch.testing.assert_close(probs.var(0), exact.variance(o, a), atol=0.02, rtol=0)


@given(st.integers(0, 1000), st.integers(3, 40))
def test_links_count_what_stands_out(seed: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(60, classes, generator=generator).softmax(-1)
    rho = torch.rand(60, classes, generator=generator) ** 6
    labels = torch.randint(classes, (60,), generator=generator)
    found = confusion_graph.links(Outputs(probs, rho, labels), classes=8, limit=9)
    answers = probs.argmax(-1)
    flags = Outputs(probs, rho).confusable()
    assert len(found) <= 9
    assert len({k for one in found for k in (one.first, one.second)}) <= 8
    assert [one.flagged for one in found] == sorted((one.flagged for one in found), reverse=True)
    for one in found:
        pair = {one.first, one.second}
        count = sum(len(pair & {int(answers[i]), k}) == 2 for i in range(60) for k in flags[i])
        members = sum(int(answer) in pair for answer in answers)
        assert one.flagged == pytest.approx(count / members)
        assert one.mistakes == sum({int(y), int(p)} == pair for y, p in zip(labels, answers, strict=True))


def test_links_of_a_model_that_is_always_sure_are_its_mistakes() -> None:
    probs = torch.tensor([[0.99, 0.01, 0.0], [0.99, 0.01, 0.0], [0.01, 0.99, 0.0], [0.0, 0.0, 1.0]])
    found = confusion_graph.links(Outputs(probs, torch.ones(4, 3), torch.tensor([1, 1, 2, 2])))
    assert [(one.first, one.second, one.mistakes) for one in found] == [(0, 1, 2), (1, 2, 1)]


@pytest.mark.parametrize(
    ("labels", "words"),
    [([1, 1, 2, 2], "a and b (2 mistakes), b and c (1 mistakes)"), ([0, 0, 1, 2], "no test example is mistaken")],
)
def test_the_graph_of_a_model_that_is_always_sure_is_drawn_by_its_mistakes(labels: list[int], words: str) -> None:
    pytest.importorskip("matplotlib")
    probs = torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0]])
    run: Any = SimpleNamespace(
        outputs=Outputs(probs, torch.ones(4, 3), torch.tensor(labels)), classes=("a", "b", "c"), path=Path("run"),
        has_masks=True, head=SimpleNamespace(name="dropmax"), seed=0,
    )  # fmt: skip
    assert words in confusion_graph.draw(Subject([run]))[1]


@given(st.integers(0, 1000), st.integers(2, 30))
def test_a_circle_has_every_class_once(seed: int, classes: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randint(classes, (12, 2), generator=generator).tolist()
    found = [confusion_graph.Link(i, j, 0.1, 0) for i, j in pairs if i != j]
    order = confusion_graph.around_a_circle(found, classes)
    assert sorted(order) == list(range(classes))


@given(st.integers(6, 50))
def test_highest_and_lowest_are_in_order_and_different(classes: int) -> None:
    rho = torch.rand(classes, generator=torch.Generator().manual_seed(classes))
    shown = top_and_bottom(rho)
    assert len(set(shown)) == 6
    values = rho[shown].tolist()
    assert values == sorted(values, reverse=True)
    assert {values[0], values[-1]} == {float(rho.max()), float(rho.min())}


@given(st.text())
def test_names_are_never_mathematics(text: str) -> None:
    shown = style.plain(text)
    assert "\n" not in shown
    assert shown.count("$") == shown.count("\\$")
    assert len(shown.replace("\\$", "$")) <= 24
