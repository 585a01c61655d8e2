"""DropMax in a plain PyTorch loop.

Three lines differ from the usual version: the import, the model's last layer and the criterion. They are marked,
"# new" or "# was: ..."; undo the marks and a softmax classifier is left. The digits come with the package.

    python examples/plain_pytorch.py
"""

import torch
from torch import nn

import dropmax  # new
from dropmax.workbench.data import load
from dropmax.workbench.evaluation import confusable

digits = load("mnist-1k")
train_x, train_y = digits.train.inputs / 255, digits.train.labels
test_x, test_y = digits.test.inputs[:2000] / 255, digits.test.labels[:2000]


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
    return model.eval()


# The same code with a softmax, to see that both learn. One seed, and options that were settled while looking at these
# very test data: no evidence for either head (docs/results.md has that). They are the options of dropmax.sklearn.
HEADS = {"softmax": {}, "dropmax": {"likelihood": "exact", "prior_correction": True}}


@torch.no_grad()
def main():
    error = {}
    for head, options in HEADS.items():
        with torch.enable_grad():
            model = train(head, **options)
        predicted = model(test_x).argmax(-1)
        error[head] = (predicted != test_y).float().mean().item()
        print(f"{head:8} errs on {error[head]:.2%} of the test digits")

    # What a softmax cannot say: which other classes this input may be.
    features = dropmax.features_of(model, test_x)
    rivals = confusable(model.fc.head.predict_proba(features), limit=2)
    hard = [i for i, others in enumerate(rivals) if others]
    wrong = [i for i in range(len(test_y)) if predicted[i] != test_y[i]]
    named = [i for i in wrong if test_y[i] in rivals[i]]
    print(f"{len(hard)} of {len(test_y)} may be confused; of {len(wrong)} errors, {len(named)} had named the truth")
    for i in hard[:3]:
        print(f"  number {i}: a {predicted[i]} (truly {test_y[i]}), or {' or '.join(map(str, rivals[i]))}")
    return error, rivals


if __name__ == "__main__":
    main()
