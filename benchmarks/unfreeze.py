"""A frozen pretrained network against one whose last blocks learn: ``python -m benchmarks.unfreeze --out F``.

Bird classes of CUB-200 (72 pixels, scaled to ``--size``), so many training pictures of each and all official test
pictures. Both rows go the same way; the frozen one trains the head only. Nothing is chosen on test pictures.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import append, parser
from dropmax import metrics
from dropmax.workbench.data.catalogue import data_directory
from dropmax.workbench.evaluation import predict
from dropmax.workbench.recipes import load_recipe
from dropmax.workbench.training import load_data, load_model, train

#: A learning rate that changes nothing keeps the head as it was trained on the features of the frozen network.
METHODS: dict[str, dict[str, Any]] = {
    "frozen": {"training.epochs": 1, "training.learning_rate": 1e-12},
    "unfreeze 2": {"network.unfreeze": 2},
    "unfreeze 4": {"network.unfreeze": 4},
}


def birds(place: Path, first: int, classes: int, rows: int) -> Path:
    """Link training and test pictures of classes ``first``, ``first + 1``, ... into folders, and return their place."""
    root = data_directory(None) / "CUB_200_2011"
    trained = dict(line.split() for line in (root / "train_test_split.txt").read_text().splitlines())
    count: dict[str, int] = {}
    for line in (root / "images.txt").read_text().splitlines():
        number, name = line.split()
        bird = name.split("/")[0]
        part = "train" if trained[number] == "1" else "test"
        if not first <= int(bird.split(".")[0]) < first + classes:
            continue
        if part == "train":
            count[bird] = count.get(bird, 0) + 1
            if count[bird] > rows:
                continue
        (place / part / bird).mkdir(parents=True, exist_ok=True)
        (place / part / name).symlink_to(root / "images" / name)
    return place


def run(folder: Path, method: str, seed: int, size: int, more: dict[str, Any]) -> dict[str, Any]:
    """Train by one method, and return what was measured on the test pictures."""
    started = time.process_time()
    values = {"data.name": str(folder), "data.image_size": size, "training.seed": seed, **METHODS[method], **more}
    recipe = load_recipe("own-images.unfrozen").override(values)
    with tempfile.TemporaryDirectory() as place:
        done = train(recipe, Path(place, "run"), quiet=True)
        trained, kept = load_model(done.path), done.kept()
        log = [round(row["validation"]["nll"], 3) for row in done.metrics()]
    seconds = time.process_time() - started
    data = load_data(recipe)
    found = predict(trained.model, trained.batches(data.test, 100))
    measured = metrics.evaluate(found.probs, found.labels)
    return {
        "method": method,
        "seed": seed,
        "classes": data.num_classes,
        "rows": len(data.train) + len(data.validation),
        "test": len(data.test),
        "size": size,
        "epoch": kept["epoch"],
        "validation_nll": log,
        "cpu_seconds": round(seconds, 1),
        **{name: measured[name] for name in ("error", "nll", "ece", "aurc")},
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--methods", nargs="*", default=["frozen", "unfreeze 2"], choices=METHODS)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--first", type=int, default=1, help="number of the first class")
    arguments.add_argument("--classes", type=int, default=20)
    arguments.add_argument("--rows", type=int, default=15, help="training pictures per class")
    arguments.add_argument("--size", type=int, default=128, help="side of the pictures")
    arguments.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="of the recipe")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    more = {name: json.loads(value) for name, _, value in (text.partition("=") for text in options.set)}
    with tempfile.TemporaryDirectory() as place:
        folder = birds(Path(place, "birds"), options.first, options.classes, options.rows)
        for seed in range(options.seeds):
            for method in options.methods:
                append(options.out, run(folder, method, seed, options.size, more), [seed])


if __name__ == "__main__":
    main()
