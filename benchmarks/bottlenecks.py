"""Other low-rank forms of DropMax's two mask maps, to find out what a bottleneck costs. See ``bottlenecks.toml``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dropmax import DropMax
from dropmax.linear import LowRankLinear, make_map


class Bottleneck(DropMax):
    """DropMax with a rank of its own for the retain map and for the correction map.

    Args:
        retain_rank, correction_rank: None is full rank.
        scale: multiplies the initial V of both maps, so that the masks start closer to, or further from, one half.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        retain_rank: int | None = None,
        correction_rank: int | None = None,
        scale: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(in_features, num_classes, **options)
        self.retain_rank, self.correction_rank, self.scale = retain_rank, correction_rank, scale
        self.retain = _map(in_features, num_classes, retain_rank, scale)
        self.correction = _map(in_features, num_classes, correction_rank, scale)


class SharedBottleneck(DropMax):
    """DropMax whose retain and correction maps share one U: ``a = V_a (U h) + b_a`` and ``r = V_r (U h) + b_r``."""

    def __init__(self, in_features: int, num_classes: int, *, width: int, **options: Any) -> None:
        super().__init__(in_features, num_classes, rank=width, **options)
        self.width = width
        assert isinstance(self.retain, LowRankLinear)
        assert isinstance(self.correction, LowRankLinear)
        self.correction = _Up(self.correction.up, self.retain.down)  # type: ignore[assignment]


class _Up(nn.Module):
    """``V (U h) + b``, where U belongs to another module, which saves it."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        self.up = up
        self.__dict__["down"] = down

    def forward(self, rows: Tensor) -> Tensor:
        found: Tensor = self.up(self.__dict__["down"](rows))
        return found


def _map(in_features: int, num_classes: int, rank: int | None, scale: float) -> Any:
    made = make_map(in_features, num_classes, rank)
    last = made.up if isinstance(made, LowRankLinear) else made
    assert isinstance(last, nn.Linear)
    with torch.no_grad():
        last.weight *= scale
    return made
