"""Small estimators to test with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dropmax.sklearn import DropMaxClassifier


def quick(**parameters: Any) -> DropMaxClassifier:
    return DropMaxClassifier(**{"max_iter": 5, "hidden_layer_sizes": (8,), "random_state": 0, **parameters})


def same_model(first: DropMaxClassifier, second: DropMaxClassifier) -> bool:
    states = first.model_.state_dict(), second.model_.state_dict()
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])


class Conv(nn.Module):
    """A network of the user's own, which has no out_features and works on its input in place."""

    def __init__(self, n_features: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 3, 2)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.conv(x.mul_(2).unsqueeze(1)).relu().flatten(1))
