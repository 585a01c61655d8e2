"""A pretrained network for photographs whose last blocks learn, with hidden layers behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dropmax.errors import InvalidValue
from dropmax.workbench.backbones import lite
from dropmax.workbench.data.dataset import statistics
from dropmax.workbench.networks.common import check_image_shape
from dropmax.workbench.networks.small import MLP


class Pretrained(nn.Module):
    """EfficientNet-Lite from pixels in [0, 1] to features, standardised, and then as in :class:`MLP`.

    The weights of the last ``unfreeze`` blocks, and of the convolution behind them, learn; all before them are frozen.
    A new network has random weights. :meth:`start` loads the pretrained ones, as training does first; a saved model
    brings its own.
    """

    out_features: int
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        input_shape: Sequence[int],
        backbone: str,
        unfreeze: int = 2,
        hidden: Sequence[int] = (512,),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        if check_image_shape(backbone, input_shape, smallest=32)[0] != 3:
            raise InvalidValue(f"{backbone} takes colour images, got input_shape {tuple(input_shape)}")
        self.backbone = backbone
        self.graph = lite(backbone).requires_grad_(False)
        blocks = self.graph.net._blocks
        if type(unfreeze) is not int or not 1 <= unfreeze <= len(blocks):
            raise InvalidValue(
                f"{backbone} has {len(blocks)} blocks: unfreeze takes 1 to {len(blocks)}, got {unfreeze}"
            )
        for module in (*blocks[-unfreeze:], self.graph.net._conv_head):
            module.requires_grad_(True)
        width = self.graph.net._conv_head.out_channels
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))
        self.layers = MLP(width, hidden, dropout)
        self.out_features = self.layers.out_features

    def start(self) -> None:
        """Load the pretrained weights."""
        self.graph.load_state_dict(lite(self.backbone, pretrained=True).state_dict())

    def standardise(self, features: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Let features like these, those of the training rows, have mean 0 and deviation 1; return what they had."""
        found = statistics(features)
        for buffer, values in zip((self.mean, self.std), found, strict=True):
            buffer.copy_(torch.tensor(values))
        return found

    def train(self, mode: bool = True) -> Pretrained:
        """Set the mode of the hidden layers; the pretrained network has no layer that depends on it."""
        super().train(mode)
        self.graph.eval()  # or else it would leave out whole blocks at random
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, H, W) with pixels in [0, 1] to features (N, out_features)."""
        h: Tensor = self.layers((self.graph.features(x) - self.mean) / self.std)
        return h
