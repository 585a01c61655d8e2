"""DropMax in a plain PyTorch loop.

Three lines differ from the usual version: the import, the model's last layer and the criterion. They are marked,
"# new" or "# was: ..."; undo the marks and a softmax classifier is left.

    python examples/plain_pytorch.py
"""

import torch
from shared import compare, digits
from torch import nn

import dropmax  # new

train_x, train_y, test_x, test_y = digits()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU())
        self.fc = nn.Linear(128, 10)

    def forward(self, x):
        return self.fc(self.body(x))


def train(head="dropmax", **options):
    torch.manual_seed(0)
    model = Network()
    model = dropmax.replace_head(model, head, packed=True, **options)  # new
    criterion = dropmax.DropMaxLoss(model)  # was: criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(10):
        for rows in torch.randperm(len(train_x)).split(50):
            optimizer.zero_grad()
            loss = criterion(model(train_x[rows]), train_y[rows])
            loss.backward()
            optimizer.step()
    model.eval()
    return model, (model(test_x).argmax(-1) != test_y).float().mean().item()


def predict_proba(model):
    return model.fc.head.predict_proba(dropmax.features_of(model, test_x))


def main():
    return compare(train, predict_proba, test_y)


if __name__ == "__main__":
    main()
