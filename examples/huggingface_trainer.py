"""DropMax in Hugging Face's Trainer: which of six topics is a sentence about?

Three lines differ from the usual version: the import, the model's last layer and the loss. They are marked "# new".
The model is a small transformer made from a configuration, the sentences are made on the spot: topics come in
pairs that share most of their words.

    python examples/huggingface_trainer.py
"""

import os
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")  # nothing here needs a network

import torch
from shared import QUIET, compare
from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments

import dropmax  # new

OWN_WORDS = {
    "cats": "purr whiskers kitten",
    "dogs": "bark leash puppy",
    "trains": "rails conductor locomotive",
    "buses": "driver stop route",
    "soup": "broth ladle simmer",
    "bread": "crust dough knead",
}
SHARED_WORDS = ["pet fur vet tail paws", "ticket seat late station wheels", "kitchen salt recipe warm slice"]
EVERYWHERE = ["the", "a", "we", "was", "is", "very", "then", "today", "again", "there"]
TOPICS = list(OWN_WORDS)
VOCABULARY = ["[PAD]", *EVERYWHERE, *" ".join([*OWN_WORDS.values(), *SHARED_WORDS]).split()]


def write_sentences(count, seed):
    """Return sentences as the Trainer wants them: mostly filler and shared words, seldom one that gives it away."""
    generator = torch.Generator().manual_seed(seed)

    def pick(words):
        return words[torch.randint(len(words), (), generator=generator)]

    rows = []
    for i in range(count):
        topic = i % len(TOPICS)
        kinds = [EVERYWHERE, SHARED_WORDS[topic // 2].split(), OWN_WORDS[TOPICS[topic]].split()]
        chances = torch.tensor([0.5, 0.35, 0.15]).expand(12, 3)
        words = [pick(kinds[k]) for k in torch.multinomial(chances, 1, generator=generator).flatten()]
        rows.append({"input_ids": torch.tensor([VOCABULARY.index(w) for w in words]), "labels": topic})
    return rows


train_set, test_set = write_sentences(1200, seed=0), write_sentences(1200, seed=1)


def compute_metrics(prediction):
    return {"error": float((prediction.predictions.argmax(-1) != prediction.label_ids).mean())}


def train(head="dropmax", **options):
    torch.manual_seed(0)
    config = DistilBertConfig(vocab_size=len(VOCABULARY), dim=32, hidden_dim=64, n_layers=1, n_heads=2, num_labels=6)
    model = DistilBertForSequenceClassification(config)
    dropmax.replace_head(model, head, packed=True, **options)  # new
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=6,
            per_device_train_batch_size=40,
            per_device_eval_batch_size=400,
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
    words = torch.stack([row["input_ids"] for row in test_set])
    labels = torch.tensor([row["labels"] for row in test_set])

    def predict_proba(model):
        return model.classifier.head.predict_proba(dropmax.features_of(model, input_ids=words))

    def describe(i, answer, truth, others):
        return f"{' '.join(VOCABULARY[w] for w in words[i])}\n    is about {answer} (truly {truth}), or {others}"

    return compare(train, predict_proba, labels, describe, TOPICS)


if __name__ == "__main__":
    main()
