"""What the examples share: the digits, softmax beside DropMax, and a network that stands in for one of timm's."""

import torch
from torch import nn

from dropmax.workbench.data import load
from dropmax.workbench.evaluation import confusable

# One seed, and options that were settled while looking at these very test data: no evidence for either head
# (docs/results.md has that). They are the options of dropmax.sklearn.
HEADS = {"softmax": {}, "dropmax": {"likelihood": "exact", "prior_correction": True}}

# What keeps Hugging Face's Trainer on the processor, silent, and out of the working directory.
QUIET = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}


def digits():
    """Return 1,000 training digits with their labels and 2,000 test digits with theirs; they come with the package."""
    data = load("mnist-1k")
    return data.train.inputs / 255, data.train.labels, data.test.inputs[:2000] / 255, data.test.labels[:2000]


def compare(train, predict_proba, labels, describe="number {}: a {} (truly {}), or {}".format, names=range(10)):
    """Train with softmax and with DropMax, to see that both learn, and print what some inputs may be confused with.

    ``train(head, **options)`` returns a model and its test error, ``predict_proba(model)`` the probabilities of the
    test inputs. ``describe(i, answer, truth, others)`` is the line printed for input i.
    """
    error = {}
    for head, options in HEADS.items():
        model, error[head] = train(head, **options)
        print(f"{head:8} errs on {error[head]:.2%} of the test rows")

    # What the highest probability alone does not say: which other classes this input may be.
    with torch.no_grad():
        probs = predict_proba(model)
    predicted, rivals = probs.argmax(-1), confusable(probs, limit=2)
    hard = [i for i, others in enumerate(rivals) if others]
    wrong = (predicted != labels).nonzero().flatten().tolist()
    named = [i for i in wrong if labels[i] in rivals[i]]
    print(f"{len(hard)} of {len(labels)} may be confused; of {len(wrong)} errors, {len(named)} had named the truth")
    for i in hard[:3]:
        others = " or ".join(str(names[k]) for k in rivals[i])
        print(f"  {describe(i, names[predicted[i]], names[labels[i]], others)}")
    return error, rivals


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
