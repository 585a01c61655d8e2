"""Feature extractors: networks that end in the last feature vector h. The head on top is separate.

Each is an ``nn.Module`` whose ``out_features`` is the length of h.

>>> from dropmax.networks import make_network
>>> make_network("small-cnn", (3, 32, 32)).out_features
256
"""

from __future__ import annotations

from dropmax.networks.lenet import LeNet
from dropmax.networks.mlp import MLP
from dropmax.networks.registry import NETWORKS, NetworkSpec, check_import, feature_size, make_network
from dropmax.networks.resnet import BasicBlock, CifarResNet, ResNet
from dropmax.networks.small_cnn import SmallCNN
from dropmax.networks.tutorial_cnn import TutorialCNN

__all__ = [
    "MLP",
    "NETWORKS",
    "BasicBlock",
    "CifarResNet",
    "LeNet",
    "NetworkSpec",
    "ResNet",
    "SmallCNN",
    "TutorialCNN",
    "check_import",
    "feature_size",
    "make_network",
]
