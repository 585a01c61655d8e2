"""A network for arrays of features."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dropmax.checks import check_probability
from dropmax.errors import InvalidValue
from dropmax.workbench.networks.shapes import check_sizes

__all__ = ["MLP"]


class MLP(nn.Module):
    """A multi-layer perceptron: for each size in ``hidden``, fully connected, relu, dropout.

    Inputs of more than one dimension are flattened. With ``hidden=()`` the features are the inputs themselves, so that
    a head on top is a linear classifier. Weights start as PyTorch starts a linear layer.

    >>> import torch
    >>> net = MLP(64, hidden=(256, 128), dropout=0.2)
    >>> net(torch.zeros(2, 64)).shape, net.out_features
    (torch.Size([2, 128]), 128)
    """

    out_features: int

    def __init__(self, in_features: int, hidden: Sequence[int] = (256, 256), dropout: float = 0.0) -> None:
        super().__init__()
        (self.in_features,) = check_sizes("in_features", [in_features])
        check_probability("dropout", dropout, zero=True)
        layers: list[nn.Module] = []
        size = self.in_features
        for width in check_sizes("hidden", hidden):
            layers += [nn.Linear(size, width), nn.ReLU(inplace=True), nn.Dropout(dropout)]
            size = width
        self.layers = nn.Sequential(*layers)
        self.out_features = size

    def forward(self, x: Tensor) -> Tensor:
        """Map arrays (N, ...) of ``in_features`` numbers each to features (N, out_features)."""
        flat = x.flatten(1)
        if flat.shape[1] != self.in_features:
            raise InvalidValue(
                f"this MLP was made for {self.in_features} numbers per example, "
                f"got {flat.shape[1]} (a batch of shape {tuple(x.shape)})"
            )
        h: Tensor = self.layers(flat)
        return h
