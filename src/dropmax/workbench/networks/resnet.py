"""Residual networks of basic blocks: the thin ones for CIFAR, the ImageNet ones with a choice of stem, the wide ones.

The first two come from He et al., "Deep Residual Learning for Image Recognition" (2016): sections 4.2 and 4.1; the last
from Zagoruyko and Komodakis, "Wide Residual Networks" (2016).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from dropmax.checks import check_probability
from dropmax.errors import InvalidValue, check_choice
from dropmax.workbench.networks.common import check_image_shape, check_sizes, kaiming

STEMS = ("7x7", "3x3")
DEEPEST = 1202  # of He et al.; a limit keeps a wrong number from building layers without end
BLOCKS_OF_DEPTH = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}


class BasicBlock(nn.Module):
    """``relu(shortcut(x) + bn(conv3x3(relu(bn(conv3x3(x))))))``, the first convolution with the block's stride.

    Where the shape changes, the shortcut is ``"A"``, every second pixel with the new channels zero, which has no
    parameters, or ``"B"``, a 1x1 convolution with batch norm.

    >>> import torch
    >>> block = BasicBlock(16, 32, stride=2, shortcut="A")
    >>> block(torch.zeros(2, 16, 8, 8)).shape
    torch.Size([2, 32, 4, 4])
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1, shortcut: str = "B") -> None:
        super().__init__()
        if shortcut not in ("A", "B"):
            raise InvalidValue(f"unknown shortcut {shortcut!r}: it is 'A' (pad with zeros) or 'B' (1x1 convolution)")
        if shortcut == "A" and out_channels < in_channels:
            raise InvalidValue(
                f"shortcut 'A' pads channels and cannot go from {in_channels} down to {out_channels}: use 'B'"
            )
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.stride = stride
        self.new_channels = out_channels - in_channels
        self.projection: nn.Module | None = None
        if shortcut == "B" and (stride != 1 or self.new_channels != 0):
            self.projection = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, ceil(H / stride), ceil(W / stride))."""
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        return F.relu(out + self._shortcut(x), inplace=True)

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.projection is not None:
            projected: Tensor = self.projection(x)
            return projected
        if self.stride != 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            # Half of the zeros before and half behind, as in the usual implementations of option A.
            before = self.new_channels // 2
            x = F.pad(x, (0, 0, 0, 0, before, self.new_channels - before))
        return x


class _Residual(nn.Module):
    """Convolution, batch norm, relu and pooling; stages of blocks, each but the first at half size; global average."""

    out_features: int
    dropout: float = 0.0

    def _build(
        self, stem: nn.Conv2d, pool: nn.Module, widths: Sequence[int], blocks: Sequence[int], shortcut: str, zero: bool
    ) -> None:
        self.conv, self.pool = stem, pool
        self.bn = nn.BatchNorm2d(widths[0])
        in_channels, stages = widths[0], []
        for index, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            stage = []
            for position in range(count):
                stride = 2 if index > 0 and position == 0 else 1
                stage.append(BasicBlock(in_channels, width, stride, shortcut))
                in_channels = width
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.out_features = widths[-1]
        kaiming(self)
        if zero:  # every block starts as its shortcut, which steadies the first steps
            for module in self.modules():
                if isinstance(module, BasicBlock):
                    nn.init.zeros_(module.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to features (N, out_features)."""
        x = self.pool(F.relu(self.bn(self.conv(x)), inplace=True))
        features: Tensor = self.stages(x).mean(dim=(2, 3))
        return F.dropout(features, self.dropout, self.training) if self.dropout else features


class CifarResNet(_Residual):
    """The thin residual network for CIFAR of 6n + 2 layers: depth 20, 32, 44, 56, 110 and so on.

    conv 3x3 to 16 channels, batch norm, relu; three stages of n basic blocks with 16, 32 and 64 channels, at full, half
    and quarter size; global average. The head on top is the last of these layers.

    The paper says "ResNet-34" of CIFAR and gives no widths; its errors are those of the thin net. The default is
    depth 32 with shortcuts ``"B"``: its 32 layers and its two 1x1 projections are the nearest there is to 34.
    Shortcuts ``"A"``, without parameters, are what He et al. used on CIFAR. ``dropout`` is that of the features.

    >>> import torch
    >>> net = CifarResNet(depth=20)
    >>> net(torch.zeros(2, 3, 32, 32)).shape, net.out_features
    (torch.Size([2, 64]), 64)
    """

    def __init__(
        self,
        input_shape: Sequence[int] = (3, 32, 32),
        depth: int = 32,
        widths: Sequence[int] = (16, 32, 64),
        shortcut: str = "B",
        zero_init_residual: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_probability("dropout", dropout, zero=True)
        self.dropout = dropout
        channels, _, _ = check_image_shape("CifarResNet", input_shape)
        (depth,) = check_sizes("depth", [depth])
        if depth < 8 or depth % 6 != 2:
            nearest = max(8, 6 * round((depth - 2) / 6) + 2)
            raise InvalidValue(f"a CifarResNet has depth 6n + 2 (8, 14, 20, 26, 32, ...), got {depth}: try {nearest}")
        if depth > DEEPEST:
            raise InvalidValue(f"a CifarResNet has at most {DEEPEST} layers, the deepest ever tried, got {depth}")
        widths = check_sizes("widths", widths)
        if len(widths) != 3:
            raise InvalidValue(f"a CifarResNet has three stages and so three widths, got {widths}")
        stem = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self._build(stem, nn.Identity(), widths, [(depth - 2) // 6] * 3, shortcut, zero_init_residual)


class ResNet(_Residual):
    """The ImageNet residual network of 18 or 34 layers: four stages with 64, 128, 256 and 512 channels.

    ``stem="7x7"`` is the original: conv 7x7 stride 2, batch norm, relu, max-pool 3x3 stride 2; stages of (2, 2, 2, 2)
    or (3, 4, 6, 3) basic blocks; global average. The last map is 32 times smaller than the image, so this stem is for
    large ones. ``stem="3x3"`` is for images of about 32 pixels: conv 3x3 and no pooling, the last map is 8 times
    smaller. Convolutions start Kaiming normal (fan-out); ``zero_init_residual`` starts the last batch norm of every
    residual branch at zero.

    >>> import torch
    >>> net = ResNet(depth=18, input_shape=(3, 32, 32), stem="3x3")
    >>> net(torch.zeros(2, 3, 32, 32)).shape, net.out_features
    (torch.Size([2, 512]), 512)
    """

    def __init__(
        self,
        depth: int = 18,
        input_shape: Sequence[int] = (3, 224, 224),
        stem: str = "7x7",
        widths: Sequence[int] = (64, 128, 256, 512),
        zero_init_residual: bool = False,
    ) -> None:
        super().__init__()
        channels, _, _ = check_image_shape("ResNet", input_shape)
        if depth not in BLOCKS_OF_DEPTH:
            raise InvalidValue(f"a ResNet has depth 18 or 34, got {depth!r}; for 6n + 2 layers there is CifarResNet")
        widths = check_sizes("widths", widths)
        if len(widths) != 4:
            raise InvalidValue(f"a ResNet has four stages and so four widths, got {widths}")
        check_choice("stem", stem, STEMS)
        side, stride, pool = (7, 2, nn.MaxPool2d(3, stride=2, padding=1)) if stem == "7x7" else (3, 1, nn.Identity())
        conv = nn.Conv2d(channels, widths[0], side, stride, padding=side // 2, bias=False)
        self._build(conv, pool, widths, BLOCKS_OF_DEPTH[depth], "B", zero_init_residual)


class WideBlock(nn.Module):
    """``shortcut + conv3x3(relu(bn(conv3x3(relu(bn(x))))))``: activation before convolution.

    The shortcut is x, or, where the shape changes, a 1x1 convolution of ``relu(bn(x))``.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.projection: nn.Module | None = None
        if stride != 1 or in_channels != out_channels:
            self.projection = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in_channels, H, W) to (N, out_channels, ceil(H / stride), ceil(W / stride))."""
        active = F.relu(self.bn1(x), inplace=True)
        shortcut = x if self.projection is None else self.projection(active)
        out: Tensor = shortcut + self.conv2(F.relu(self.bn2(self.conv1(active)), inplace=True))
        return out


class WideResNet(nn.Module):
    """The wide residual network WRN-depth-width for images of about 32 pixels, of 6n + 4 layers.

    conv 3x3 to 16 channels; three stages of n blocks with 16, 32 and 64 times ``width`` channels, at full, half and
    quarter size; batch norm, relu, global average. ``dropout`` is that of the features.

    >>> import torch
    >>> net = WideResNet(depth=16, width=2)
    >>> net(torch.zeros(2, 3, 32, 32)).shape, net.out_features
    (torch.Size([2, 128]), 128)
    """

    def __init__(
        self, input_shape: Sequence[int] = (3, 32, 32), depth: int = 16, width: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        check_probability("dropout", dropout, zero=True)
        self.dropout = dropout
        channels, _, _ = check_image_shape("WideResNet", input_shape)
        depth, width = check_sizes("depth and width", [depth, width])
        if depth < 10 or depth % 6 != 4:
            nearest = max(10, 6 * round((depth - 4) / 6) + 4)
            raise InvalidValue(f"a WideResNet has depth 6n + 4 (10, 16, 22, 28, 40, ...), got {depth}: try {nearest}")
        if depth > DEEPEST:
            raise InvalidValue(f"a WideResNet has at most {DEEPEST} layers here, got {depth}")
        self.conv = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        in_channels, blocks = 16, []
        for index, base in enumerate((16, 32, 64)):
            for position in range((depth - 4) // 6):
                stride = 2 if index > 0 and position == 0 else 1
                blocks.append(WideBlock(in_channels, base * width, stride))
                in_channels = base * width
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(in_channels)
        self.out_features = in_channels
        kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to features (N, out_features)."""
        features: Tensor = F.relu(self.bn(self.blocks(self.conv(x))), inplace=True).mean(dim=(2, 3))
        return F.dropout(features, self.dropout, self.training) if self.dropout else features
