"""Feature extractors: networks that end in the last feature vector h. The head on top is separate.

Each is an ``nn.Module`` whose ``out_features`` is the length of h.

>>> from dropmax.workbench.networks import make_network
>>> make_network("small-cnn", (3, 32, 32)).out_features
256
"""

from __future__ import annotations

from dropmax.workbench.networks.mlp import MLP
from dropmax.workbench.networks.mnist import LeNet, TutorialCNN
from dropmax.workbench.networks.pretrained import Pretrained
from dropmax.workbench.networks.registry import NETWORKS, NetworkSpec, feature_size, make_network
from dropmax.workbench.networks.resnet import BasicBlock, CifarResNet, ResNet
from dropmax.workbench.networks.small_cnn import SmallCNN

__all__ = [
    "MLP",
    "NETWORKS",
    "BasicBlock",
    "CifarResNet",
    "LeNet",
    "NetworkSpec",
    "Pretrained",
    "ResNet",
    "SmallCNN",
    "TutorialCNN",
    "feature_size",
    "make_network",
]
