"""Many classes: rho must find the classes that are truly confusable, and training must stay stable."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from dropmax import PAPER_OBJECTIVE, DropMax

GROUP = 5
DIMENSIONS = 32


@dataclass
class Groups:
    """Classes in groups of five: far between groups, and so near within one that they overlap."""

    num_classes: int
    within: float = 0.4

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        centres = 2 * torch.randn(self.num_classes // GROUP, DIMENSIONS, generator=generator)
        offsets = self.within * torch.randn(self.num_classes, DIMENSIONS, generator=generator)
        self.means = centres.repeat_interleave(GROUP, 0) + offsets

    def draw(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(self.num_classes, (count,), generator=generator)
        return self.means[labels] + torch.randn(count, DIMENSIONS, generator=generator), labels

    def same_group(self, labels: Tensor) -> Tensor:
        group = torch.arange(self.num_classes) // GROUP
        return group[labels, None] == group


def trained(
    problem: Groups, options: dict[str, float], *, steps: int, seed: int, precision: str = "float32"
) -> tuple[nn.Module, DropMax]:
    torch.manual_seed(seed)
    head = DropMax(64, problem.num_classes, **options)
    net = nn.Sequential(nn.Linear(DIMENSIONS, 64), nn.ReLU())
    optimizer = torch.optim.Adam([*net.parameters(), *head.parameters()], lr=1e-2)
    x, y = problem.draw(40 * problem.num_classes, seed=1 + seed)
    for _ in range(steps):
        rows = torch.randint(len(x), (256,))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            loss = head.loss(net(x[rows]), y[rows]).total
        assert loss.isfinite()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net, head


@torch.no_grad()
def retain_by_kind(problem: Groups, net: nn.Module, head: DropMax) -> tuple[float, float, float]:
    """Return the mean rho of the target, of rivals in its group, and of all other classes."""
    x, y = problem.draw(4000, seed=1000)
    rho, same = head.retain_probs(net(x)), problem.same_group(y)
    target = nn.functional.one_hot(y, problem.num_classes).bool()
    return rho[target].mean().item(), rho[same & ~target].mean().item(), rho[~same].mean().item()


@pytest.mark.parametrize("seed", [0, 1])
def test_rho_is_high_for_the_rivals_that_are_truly_confusable_and_low_for_the_others(seed: int) -> None:
    problem = Groups(num_classes=100)
    found = {}
    for name, options in {"default": {}, "printed": PAPER_OBJECTIVE}.items():
        found[name] = retain_by_kind(problem, *trained(problem, options, steps=300, seed=seed))
    target, inside, outside = found["default"]
    assert target > 0.8
    assert inside > 0.6
    assert outside < 0.45
    # The printed objective tells them apart too, but hardly: everything sinks towards 0.2178, the target with it.
    printed_target, printed_inside, printed_outside = found["printed"]
    assert printed_target < 0.6
    assert inside - outside > 1.5 * (printed_inside - printed_outside)
    assert printed_outside < 0.3


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_thousand_classes_train_stably(precision: str) -> None:
    problem = Groups(num_classes=1000)
    net, head = trained(problem, {}, steps=150, seed=0, precision=precision)
    x, y = problem.draw(2000, seed=1000)
    with torch.no_grad():
        error = (head(net(x)).argmax(-1) != y).float().mean().item()
    assert error < 0.9  # by chance, 0.999
    target, inside, outside = retain_by_kind(problem, net, head)
    assert target > inside > outside
