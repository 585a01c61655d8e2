"""DropMax in a skorch net, which goes into scikit-learn's pipelines and searches.

Five lines differ from the usual version: the import, the module's last layer, two for the criterion, and the softmax
that skorch applies by itself after nn.CrossEntropyLoss only. They are marked, "# new" or "# was: ...".

    python examples/skorch_net.py
"""

import torch
from shared import compare, digits
from skorch import NeuralNetClassifier
from torch import nn

import dropmax  # new

train_x, train_y, test_x, test_y = digits()


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
    net.fit(train_x, train_y)
    return net, 1 - net.score(test_x, test_y)


def predict_proba(net):
    model = net.module_.eval()
    return model.fc.head.predict_proba(dropmax.features_of(model, test_x))


def main():
    return compare(train, predict_proba, test_y)


if __name__ == "__main__":
    main()
