"""DropMax in a LightningModule.

Four lines differ from the usual version: the import, the model's last layer, the criterion, and the training accuracy,
which wants logits. They are marked, "# new" or "# was: ...". Validation and prediction are as they were: in evaluation
mode the model returns logits.

    python examples/lightning_module.py
"""

import logging
import warnings

import lightning
import torch
from shared import compare, digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dropmax  # new

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # no advertisements between the results
warnings.filterwarnings("ignore", module="lightning")

train_x, train_y, test_x, test_y = digits()


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
    trainer.fit(module, DataLoader(TensorDataset(train_x, train_y), batch_size=50, shuffle=True))
    measured = trainer.validate(module, DataLoader(TensorDataset(test_x, test_y), batch_size=500), verbose=False)
    return module.eval(), measured[0]["error"]


def predict_proba(module):
    return module.model[-1].head.predict_proba(dropmax.features_of(module, test_x))


def main():
    return compare(train, predict_proba, test_y)


if __name__ == "__main__":
    main()
