"""Small networks: the MLP, the two networks for MNIST, and a convolutional one for two CPU cores."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from dropmax.checks import check_choice, check_probability
from dropmax.errors import InvalidValue
from dropmax.workbench.networks.common import (
    check_image_shape,
    check_input,
    check_sizes,
    glorot,
    kaiming,
    truncated_normal,
)


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


class LeNet(nn.Module):
    """LeNet as in the authors' released code: each convolution is rectified and then pooled.

    A 28x28x1 image becomes 24x24x20 (conv 5x5, VALID, relu), 12x12x20 (max-pool 2), 8x8x50 and 4x4x50 by another
    such pair, and 500 (fully connected, relu). Images of at least 16x16 work. That code has no dropout; ``dropout`` is
    the share of the features dropped in training, for comparisons. Weights start Glorot uniform and biases at zero, the
    defaults of the ``tf.layers`` that code is written with.

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
        rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))  # after conv, pool, conv, pool
        self.fc = nn.Linear(50 * rows * columns, self.out_features)
        check_probability("dropout", dropout, zero=True)
        self.dropout = dropout
        glorot(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to features (N, out_features)."""
        check_input("LeNet", x, self.input_shape)
        # A maximum and a rectifier commute: pooled first, the rectifier has a quarter of the work.
        x = F.relu(self.pool(self.conv1(x)))
        x = F.relu(self.pool(self.conv2(x)))
        x = F.relu(self.fc(x.flatten(1)))
        # Dropout of nothing would still draw random numbers, and so change every run without it.
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class TutorialCNN(nn.Module):
    """The CNN of TensorFlow's "Deep MNIST for Experts" tutorial, which the paper names as its MNIST network.

    A 28x28x1 image becomes 28x28x32 (conv 5x5, SAME, relu), 14x14x32 (max-pool 2, SAME), 14x14x64 and 7x7x64 by
    another such pair, and 1024 (fully connected, relu), of which ``dropout`` drops half in training. SAME pooling
    rounds odd sizes up, so an image of any size works.

    ``init="tutorial"`` is the tutorial's own start, a normal of deviation 0.1 truncated at 0.2 with biases at 0.1;
    ``init="glorot"`` is Glorot uniform with zero biases. The paper does not say which. With a softmax head on MNIST-1K
    (Adam 1e-4, batch 50, 80 epochs, 5,000 held-out images, three seeds) the first has 3.72, 3.86, 4.08 % error and NLL
    0.14, the second 3.86, 4.80, 4.86 % and 0.16 to 0.18, so the tutorial's is the default.

    >>> import torch
    >>> net = TutorialCNN()
    >>> net(torch.zeros(2, 1, 28, 28)).shape, net.out_features
    (torch.Size([2, 1024]), 1024)
    """

    out_features: int

    def __init__(
        self, input_shape: Sequence[int] = (1, 28, 28), hidden: int = 1024, dropout: float = 0.5, init: str = "tutorial"
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
        (glorot if init == "glorot" else truncated_normal)(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to features (N, out_features)."""
        check_input("TutorialCNN", x, self.input_shape)
        # A maximum and a rectifier commute: pooled first, the rectifier has a quarter of the work.
        x = F.relu(self.pool(self.conv1(x)))
        x = F.relu(self.pool(self.conv2(x)))
        h: Tensor = self.dropout(F.relu(self.fc(x.flatten(1))))
        return h


class SmallCNN(nn.Module):
    """A plain convolutional network for images of 32 to 64 pixels, made for this package.

    One block for each width: ``convs_per_block`` times (conv 3x3 without bias, batch norm, relu), with a max-pool 2
    between blocks and a global average at the end: 32x32x3 becomes 32x32x64, 16x16x128, 8x8x256 and 256 features.
    ``stem_stride`` is the stride of the first convolution: 2 makes everything after it four times cheaper. ``dropout``
    is the share of the features dropped in training. Convolutions start Kaiming normal (fan-out).

    >>> import torch
    >>> net = SmallCNN()
    >>> net(torch.zeros(2, 3, 32, 32)).shape, net.out_features
    (torch.Size([2, 256]), 256)
    """

    out_features: int

    def __init__(
        self,
        input_shape: Sequence[int] = (3, 32, 32),
        widths: Sequence[int] = (64, 128, 256),
        convs_per_block: int = 1,
        stem_stride: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_probability("dropout", dropout, zero=True)
        widths = check_sizes("widths", widths)
        if not widths:
            raise InvalidValue("widths is empty: give one width for each block, such as (64, 128, 256)")
        (convs_per_block,) = check_sizes("convs_per_block", [convs_per_block])
        if convs_per_block > 100:  # a wrong number would build layers without end
            raise InvalidValue(f"convs_per_block must be at most 100, got {convs_per_block}")
        (stem_stride,) = check_sizes("stem_stride", [stem_stride])
        channels, _, _ = check_image_shape("SmallCNN", input_shape, smallest=stem_stride * 2 ** (len(widths) - 1))
        layers: list[nn.Module] = []
        for block, width in enumerate(widths):
            for conv in range(convs_per_block):
                stride = 1 if layers else stem_stride
                layers += [nn.Conv2d(channels, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width)]
                if conv + 1 == convs_per_block and block + 1 < len(widths):
                    layers.append(nn.MaxPool2d(2))  # before the relu: the same numbers for a quarter of its work
                layers.append(nn.ReLU(inplace=True))
                channels = width
        self.layers = nn.Sequential(*layers)
        self.out_features = channels
        self.dropout = nn.Dropout(dropout)
        kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to features (N, out_features)."""
        features: Tensor = self.dropout(self.layers(x).mean(dim=(2, 3)))
        return features
