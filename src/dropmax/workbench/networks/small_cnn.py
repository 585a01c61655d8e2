"""A network for the experiments with many classes, small enough for two CPU cores."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from dropmax.checks import check_probability
from dropmax.errors import InvalidValue
from dropmax.workbench.networks import initialise
from dropmax.workbench.networks.shapes import check_image_shape, check_sizes

__all__ = ["SmallCNN"]


class SmallCNN(nn.Module):
    """A plain convolutional network for images of 32 to 64 pixels, made for this package.

    One block for each width: ``convs_per_block`` times (conv 3x3 without bias, batch norm, relu). A max-pool 2 stands
    between blocks and a global average at the end. With the default widths, 32x32x3 becomes 32x32x64, 16x16x128,
    8x8x256 and at last 256 features. ``stem_stride`` is the stride of the first convolution: 2 makes everything after
    it four times cheaper. ``dropout`` is the share of the features dropped in training. Convolutions start Kaiming
    normal (fan-out).

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
                layers += [
                    nn.Conv2d(channels, width, 3, stride, padding=1, bias=False),
                    nn.BatchNorm2d(width),
                ]
                if conv + 1 == convs_per_block and block + 1 < len(widths):
                    layers.append(nn.MaxPool2d(2))  # before the relu: the same numbers for a quarter of its work
                layers.append(nn.ReLU(inplace=True))
                channels = width
        self.layers = nn.Sequential(*layers)
        self.out_features = channels
        self.dropout = nn.Dropout(dropout)
        initialise.kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to features (N, out_features)."""
        x = self.layers(x)
        features: Tensor = self.dropout(x.mean(dim=(2, 3)))
        return features
