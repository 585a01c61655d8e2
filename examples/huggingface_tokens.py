"""DropMax in Hugging Face's Trainer, one label per word: is Washington a person, a place or a company?

Three lines differ from the usual version: the import, the model's last layer and the loss. They are marked "# new".
Padding carries the label -100, which does not count, as everywhere in that library. The model is a small
transformer made from a configuration, the sentences are made on the spot; where no word tells what a name is, nobody
can know.

    python examples/huggingface_tokens.py
"""

import os
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")  # nothing here needs a network

import torch
from shared import QUIET, compare
from transformers import DistilBertConfig, DistilBertForTokenClassification, Trainer, TrainingArguments

import dropmax  # new

TAGS = ["word", "person", "place", "company"]
NAMES = {  # and what they may be
    "washington": [1, 2],
    "jordan": [1, 2],
    "ford": [1, 3],
    "morgan": [1, 3],
    "amazon": [2, 3],
    "alice": [1],
    "paris": [2],
    "acme": [3],
}
# The words before a name tell what it is, unless they are "about".
TELLING = {1: ["mrs", "mister"], 2: ["in", "near"], 3: ["shares of", "hired by"]}
FILLER = ["we", "saw", "that", "it", "was", "there", "and", "then", "somebody", "spoke"]
WORDS = sorted({word for phrases in TELLING.values() for phrase in phrases for word in phrase.split()} | {"about"})
VOCABULARY = ["[PAD]", *FILLER, *WORDS, *NAMES]
LENGTH = 9


def write_sentences(count, seed):
    """Return padded sentences with one tag per word, as the Trainer wants them."""
    generator = torch.Generator().manual_seed(seed)

    def pick(choices):
        return choices[torch.randint(len(choices), (), generator=generator)]

    rows = []
    for _ in range(count):
        name = pick(list(NAMES))
        tag = pick(NAMES[name])
        before = [pick(FILLER) for _ in range(pick([1, 2, 3]))] + pick([*TELLING[tag], "about"]).split()
        after = [pick(FILLER) for _ in range(pick([1, 2, 3]))]
        words = [*before, name, *after]
        tags = [0] * len(before) + [tag] + [0] * len(after)
        padding = LENGTH - len(words)
        rows.append(
            {
                "input_ids": torch.tensor([VOCABULARY.index(w) for w in words] + [0] * padding),
                "attention_mask": torch.tensor([1] * len(words) + [0] * padding),
                "labels": torch.tensor(tags + [-100] * padding),
            }
        )
    return rows


train_set, test_set = write_sentences(1000, seed=0), write_sentences(500, seed=1)


def compute_metrics(prediction):
    named = prediction.label_ids > 0  # the names: anybody can tag the other words
    return {"error": float((prediction.predictions.argmax(-1) != prediction.label_ids)[named].mean())}


def train(head="dropmax", **options):
    torch.manual_seed(0)
    sizes = {"dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 2}
    config = DistilBertConfig(vocab_size=len(VOCABULARY), num_labels=4, initializer_range=0.2, **sizes)
    model = DistilBertForTokenClassification(config)
    dropmax.replace_head(model, head, packed=True, **options)  # new
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=5,
            per_device_train_batch_size=20,
            gradient_accumulation_steps=2,
            per_device_eval_batch_size=500,
            learning_rate=5e-3,
            **QUIET,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=train_set,
            eval_dataset=test_set,
            compute_loss_func=dropmax.DropMaxLoss(model).compute_loss_func,  # new
            compute_metrics=compute_metrics,
        )
        trainer.train()
        return model, trainer.evaluate()["eval_error"]


def main():
    batch = {key: torch.stack([row[key] for row in test_set]) for key in test_set[0]}
    labels = batch.pop("labels")
    named = labels > 0
    places = named.nonzero().tolist()

    def predict_proba(model):
        return model.classifier.head.predict_proba(dropmax.features_of(model, **batch)[named])

    def describe(i, answer, truth, others):
        row, column = places[i]
        words = [VOCABULARY[w] for w in batch["input_ids"][row][: column + 1]]
        return f"{' '.join(words)}: a {answer} (truly a {truth}), or a {others}"

    return compare(train, predict_proba, labels[named], describe, TAGS)


if __name__ == "__main__":
    main()
