"""DropMax on a timm model.

Three lines differ from the usual version: the import, the model's last layer and the criterion. They are marked,
"# new" or "# was: ...". Any timm model with one linear classifier will do; without timm, a small network with its
interface stands in.

    python examples/timm_model.py
"""

import torch
from shared import compare, digits

import dropmax  # new

try:
    from timm import create_model
except ImportError:
    from shared import create_model

train_x, train_y, test_x, test_y = digits()


def train(head="dropmax", **options):
    torch.manual_seed(0)
    model = create_model("resnet10t", in_chans=1, num_classes=1000)  # pretrained=True where there is a network
    model.reset_classifier(num_classes=10)
    model = dropmax.replace_head(model, head, packed=True, **options)  # new
    criterion = dropmax.DropMaxLoss(model)  # was: criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(10):
        for rows in torch.randperm(len(train_x)).split(50):
            optimizer.zero_grad()
            loss = criterion(model(train_x[rows] - 0.5), train_y[rows])
            loss.backward()
            optimizer.step()
    model.eval()
    return model, (model(test_x - 0.5).argmax(-1) != test_y).float().mean().item()


def predict_proba(model):
    features = model.forward_head(model.forward_features(test_x - 0.5), pre_logits=True)  # timm's own way to them
    return model.get_classifier().head.predict_proba(features)


def main():
    return compare(train, predict_proba, test_y)


if __name__ == "__main__":
    main()
