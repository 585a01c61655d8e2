"""DropMax in a skorch net, which goes into scikit-learn's pipelines and searches.

Five lines differ from the usual version: the import, the module's last layer, two for the criterion, and the softmax
that skorch applies by itself after nn.CrossEntropyLoss only. They are marked, "# new" or "# was: ...". The digits come
with the package.

    python examples/skorch_net.py
"""

import torch
from skorch import NeuralNetClassifier
from torch import nn

import dropmax  # new
from dropmax.workbench.data import load
from dropmax.workbench.evaluation import confusable

digits = load("mnist-1k")
train_x, train_y = digits.train.inputs / 255, digits.train.labels
test_x, test_y = digits.test.inputs[:2000] / 255, digits.test.labels[:2000]


class Network(nn.Module):
    def __init__(self, head, options):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU())
        self.fc = dropmax.PackedHead(dropmax.make_head(head, 128, 10, **options))  # was: self.fc = nn.Linear(128, 10)

    def forward(self, x):
        return self.fc(self.body(x))


def train(head="dropmax", **options):
    torch.manual_seed(0)
    net = NeuralNetClassifier(
        Network,
        module__head=head,
        module__options=options,
        criterion=dropmax.DropMaxLoss,  # was: criterion=nn.CrossEntropyLoss,
        criterion__head=dropmax.make_head(head, 128, 10, **options),  # new
        predict_nonlinearity=nn.Softmax(-1),  # new
        optimizer=torch.optim.Adam,
        lr=3e-3,
        batch_size=50,
        max_epochs=10,
        iterator_train__shuffle=True,
        verbose=0,
    )
    return net.fit(train_x, train_y)


# The same code with a softmax, to see that both learn. One seed, and options that were settled while looking at these
# very test data: no evidence for either head (docs/results.md has that). They are the options of dropmax.sklearn.
HEADS = {"softmax": {}, "dropmax": {"likelihood": "exact", "prior_correction": True}}


@torch.no_grad()
def main():
    error = {}
    for head, options in HEADS.items():
        with torch.enable_grad():
            net = train(head, **options)
        error[head] = 1 - net.score(test_x, test_y)
        print(f"{head:8} errs on {error[head]:.2%} of the test digits")

    model = net.module_.eval()
    features = dropmax.features_of(model, test_x)
    predicted = torch.from_numpy(net.predict(test_x))
    rivals = confusable(model.fc.head.predict_proba(features), limit=2)
    hard = [i for i, others in enumerate(rivals) if others]
    print(f"{len(hard)} of {len(test_x)} may be confused, for instance")
    for i in hard[:3]:
        print(f"  number {i}: a {predicted[i]} (truly {test_y[i]}), or {' or '.join(map(str, rivals[i]))}")
    return error, rivals


if __name__ == "__main__":
    main()
