"""The two networks for MNIST: that of the authors' released code, and that of the paper."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from dropmax.checks import check_choice, check_probability
from dropmax.workbench.networks import initialise
from dropmax.workbench.networks.shapes import check_image_shape, check_input, check_sizes

__all__ = ["LeNet", "TutorialCNN"]


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


class TutorialCNN(nn.Module):
    """The CNN of TensorFlow's "Deep MNIST for Experts" tutorial, which the paper names as its MNIST network.

    ====  =============================  ==============
    no.   layer                          28x28x1 becomes
    ====  =============================  ==============
    1     conv 5x5, 32, SAME, relu       28x28x32
    2     max-pool 2, SAME               14x14x32
    3     conv 5x5, 64, SAME, relu       14x14x64
    4     max-pool 2, SAME               7x7x64
    5     fully connected, relu          1024
    6     dropout 0.5                    1024
    ====  =============================  ==============

    SAME pooling rounds odd sizes up, so an image of any size works. ``init="tutorial"`` is the tutorial's own start, a
    normal of deviation 0.1 truncated at 0.2 with biases at 0.1; ``init="glorot"`` is Glorot uniform with zero biases.
    The paper does not say which. With a softmax head on MNIST-1K (Adam 1e-4, batch 50, 80 epochs, 5,000 held-out
    images, three seeds) the first has 3.72, 3.86, 4.08 % error and NLL 0.14, the second 3.86, 4.80, 4.86 % and 0.16 to
    0.18, so the tutorial's is the default.

    >>> import torch
    >>> net = TutorialCNN()
    >>> net(torch.zeros(2, 1, 28, 28)).shape, net.out_features
    (torch.Size([2, 1024]), 1024)
    """

    out_features: int

    def __init__(
        self,
        input_shape: Sequence[int] = (1, 28, 28),
        hidden: int = 1024,
        dropout: float = 0.5,
        init: str = "tutorial",
    ) -> None:
        super().__init__()
        self.input_shape = channels, height, width = check_image_shape("TutorialCNN", input_shape)
        (self.out_features,) = check_sizes("hidden", [hidden])
        check_choice("init", init, ("tutorial", "glorot"))
        check_probability("dropout", dropout, zero=True)
        pooled_twice = -(-height // 4) * -(-width // 4)  # rounding up twice by 2 is rounding up once by 4
        self.conv1 = nn.Conv2d(channels, 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        self.fc = nn.Linear(64 * pooled_twice, self.out_features)
        self.dropout = nn.Dropout(dropout)
        if init == "glorot":
            initialise.glorot(self)
        else:
            initialise.truncated_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to features (N, out_features)."""
        check_input("TutorialCNN", x, self.input_shape)
        # A maximum and a rectifier commute: pooled first, the rectifier has a quarter of the work.
        x = F.relu(self.pool(self.conv1(x)))
        x = F.relu(self.pool(self.conv2(x)))
        h: Tensor = self.dropout(F.relu(self.fc(x.flatten(1))))
        return h
