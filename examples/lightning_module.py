"""DropMax in a LightningModule.

Four lines differ from the usual version: the import, the model's last layer, the criterion, and the training accuracy,
which wants logits. They are marked, "# new" or "# was: ...". Validation and prediction are as they were: in evaluation
mode the model returns logits. The digits come with the package.

    python examples/lightning_module.py
"""

import logging
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dropmax  # new
from dropmax.workbench.data import load
from dropmax.workbench.evaluation import confusable

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # no advertisements between the results
warnings.filterwarnings("ignore", module="lightning")

digits = load("mnist-1k")
train_set = TensorDataset(digits.train.inputs / 255, digits.train.labels)
test_set = TensorDataset(digits.test.inputs[:2000] / 255, digits.test.labels[:2000])


class Digits(lightning.LightningModule):
    def __init__(self, head="dropmax", **options):
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
        dropmax.replace_head(self.model, head, packed=True, name="3", **options)  # new
        self.criterion = dropmax.DropMaxLoss(self.model)  # was: self.criterion = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, _):
        x, y = batch
        output = self.model(x)
        logits = self.criterion.logits(output)  # was: logits = output
        self.log("train_error", (logits.argmax(-1) != y).float().mean())
        return self.criterion(output, y)

    def validation_step(self, batch, _):
        x, y = batch
        logits = self.model(x)
        self.log_dict({"loss": self.criterion(logits, y), "error": (logits.argmax(-1) != y).float().mean()})

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def train(head="dropmax", **options):
    lightning.seed_everything(0, verbose=False)
    module = Digits(head, **options)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=10, accelerator="cpu", devices=1, enable_checkpointing=False, **quiet)
    trainer.fit(module, DataLoader(train_set, batch_size=50, shuffle=True))
    measured = trainer.validate(module, DataLoader(test_set, batch_size=500), verbose=False)
    return module.eval(), measured[0]


# The same code with a softmax, to see that both learn. One seed, and options that were settled while looking at these
# very test data: no evidence for either head (docs/results.md has that). They are the options of dropmax.sklearn.
HEADS = {"softmax": {}, "dropmax": {"likelihood": "exact", "prior_correction": True}}


@torch.no_grad()
def main():
    error = {}
    for head, options in HEADS.items():
        with torch.enable_grad():
            module, measured = train(head, **options)
        error[head] = measured["error"]
        print(f"{head:8} errs on {measured['error']:.2%} of the test digits, cross entropy {measured['loss']:.3f}")

    x, y = test_set.tensors
    predicted = module(x).argmax(-1)
    features = dropmax.features_of(module, x)
    rivals = confusable(module.model[-1].head.predict_proba(features), limit=2)
    hard = [i for i, others in enumerate(rivals) if others]
    print(f"{len(hard)} of {len(x)} may be confused, for instance")
    for i in hard[:3]:
        print(f"  number {i}: a {predicted[i]} (truly {y[i]}), or {' or '.join(map(str, rivals[i]))}")
    return error, rivals


if __name__ == "__main__":
    main()
