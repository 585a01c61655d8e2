"""A small convolutional network with the interface of a timm model, for machines without timm."""

from torch import nn


class SmallNetwork(nn.Module):
    """What timm's documentation promises of every model: the methods below, ``num_features`` and ``num_classes``."""

    def __init__(self, num_classes=1000, in_chans=3):
        super().__init__()
        self.num_features, self.num_classes = 64, num_classes
        self.stem = nn.Sequential(nn.Conv2d(in_chans, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU())
        self.stage = nn.Sequential(nn.Conv2d(16, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU())
        self.global_pool = nn.Sequential(nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU())
        self.fc = nn.Linear(64, num_classes)

    def get_classifier(self):
        return self.fc

    def reset_classifier(self, num_classes, global_pool=None):
        self.num_classes = num_classes
        self.fc = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()

    def forward_features(self, x):
        return self.stage(self.stem(x))

    def forward_head(self, x, pre_logits=False):
        x = self.global_pool(x)
        return x if pre_logits else self.fc(x)

    def forward(self, x):
        return self.forward_head(self.forward_features(x))


def create_model(model_name, pretrained=False, **options):
    """Build the one network there is, whatever it is called."""
    return SmallNetwork(**options)
