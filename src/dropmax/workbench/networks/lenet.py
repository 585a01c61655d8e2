"""The network of the authors' released MNIST code."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from dropmax.checks import check_probability
from dropmax.workbench.networks import initialise
from dropmax.workbench.networks.shapes import check_image_shape, check_input, check_sizes

__all__ = ["LeNet"]


class LeNet(nn.Module):
    """LeNet as in the authors' released code: each convolution is rectified and then pooled.

    ====  =============================  ==============
    no.   layer                          28x28x1 becomes
    ====  =============================  ==============
    1     conv 5x5, 20, VALID, relu      24x24x20
    2     max-pool 2                     12x12x20
    3     conv 5x5, 50, VALID, relu      8x8x50
    4     max-pool 2                     4x4x50
    5     fully connected, relu          500
    ====  =============================  ==============

    That code has no dropout; ``dropout`` is the share of the features dropped in training, for comparisons.

    Weights start Glorot uniform and biases at zero, the defaults of the ``tf.layers`` that code is written with. Images
    of at least 16x16 work.

    >>> import torch
    >>> net = LeNet()
    >>> net(torch.zeros(2, 1, 28, 28)).shape, net.out_features
    (torch.Size([2, 500]), 500)
    """

    out_features: int

    def __init__(self, input_shape: Sequence[int] = (1, 28, 28), hidden: int = 500, dropout: float = 0.0) -> None:
        super().__init__()
        self.input_shape = channels, height, width = check_image_shape("LeNet", input_shape, smallest=16)
        (self.out_features,) = check_sizes("hidden", [hidden])
        self.conv1 = nn.Conv2d(channels, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(50 * _size_at_the_end(height) * _size_at_the_end(width), self.out_features)
        check_probability("dropout", dropout, zero=True)
        self.dropout = dropout
        initialise.glorot(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to features (N, out_features)."""
        check_input("LeNet", x, self.input_shape)
        # A maximum and a rectifier commute: pooled first, the rectifier has a quarter of the work.
        x = F.relu(self.pool(self.conv1(x)))
        x = F.relu(self.pool(self.conv2(x)))
        x = F.relu(self.fc(x.flatten(1)))
        # Dropout of nothing would still draw random numbers, and so change every run without it.
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


def _size_at_the_end(size: int) -> int:
    """Height or width after conv 5, pool 2, conv 5, pool 2."""
    return ((size - 4) // 2 - 4) // 2
