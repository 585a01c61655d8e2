"""DropMax on a timm model.

Three lines differ from the usual version: the import, the model's last layer and the criterion. They are marked,
"# new" or "# was: ...". Any timm model with one linear classifier will do; without timm, a small network with its
interface stands in.

    python examples/timm_model.py
"""

import torch

import dropmax  # new
from dropmax.workbench.data import load
from dropmax.workbench.evaluation import confusable

try:
    from timm import create_model
except ImportError:
    from timm_stand_in import create_model

digits = load("mnist-1k")
train_x, train_y = digits.train.inputs / 255 - 0.5, digits.train.labels
test_x, test_y = digits.test.inputs[:2000] / 255 - 0.5, digits.test.labels[:2000]


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
        error[head] = (model(test_x).argmax(-1) != test_y).float().mean().item()
        print(f"{head:8} errs on {error[head]:.2%} of the test digits")

    # timm's own way to the features, and from there to what else an input may be.
    features = model.forward_head(model.forward_features(test_x), pre_logits=True)
    classifier = model.get_classifier().head
    predicted = classifier.predict_proba(features, "exact").argmax(-1)
    rivals = confusable(classifier.predict_proba(features), limit=2)
    hard = [i for i, others in enumerate(rivals) if others]
    print(f"{len(hard)} of {len(test_x)} may be confused, for instance")
    for i in hard[:3]:
        print(f"  number {i}: a {predicted[i]} (truly {test_y[i]}), or {' or '.join(map(str, rivals[i]))}")
    return error, rivals


if __name__ == "__main__":
    main()
