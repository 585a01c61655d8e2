"""Which scores make the smallest prediction sets? ``python -m benchmarks.set_sizes RUN [RUN ...] [--out FILE]``.

For each trained run: temperatures are fitted on its validation rows. Its test rows are split into halves, twenty times
at random: one half sets the threshold of a coverage, the other measures coverage and mean size of the sets. The scores:

- ``lac``, ``aps``, ``raps``: of the mean prediction with its temperature (the only one of a softmax);
- ``lac-exact``, ``aps-exact``: of the exact sum over all masks with its temperature;
- ``lac-rho2``: of probabilities proportional to ``exp(o) rho^2``, rho counted twice, with a temperature;
- ``lac-no-rho``: of ``softmax(o)``, rho not counted, with a temperature.

Where the data has rows of the split ``outside``, AUROC and FPR at 95 % of each outside score follow. Results are
appended to a file, one line per run; a run that is there already is not measured again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.rows import markdown, mean_and_deviation, measure_runs, parser
from dropmax import metrics
from dropmax.calibration import apply_temperature, fit_temperature
from dropmax.outside import tell_apart
from dropmax.sets import PredictionSets
from dropmax.workbench.data.npz import read_npz_rows
from dropmax.workbench.training import TrainedModel, load_data, load_model

COVERAGES = (0.9, 0.95, 0.99)
SPLITS = 20
METHODS = {
    "lac": ("lac", "mean"),
    "aps": ("aps", "mean"),
    "raps": ("raps", "mean"),
    "lac-exact": ("lac", "exact"),
    "aps-exact": ("aps", "exact"),
    "lac-rho2": ("lac", "rho2"),
    "lac-no-rho": ("lac", "no-rho"),
}


@torch.no_grad()
def probabilities(trained: TrainedModel, features: Tensor) -> dict[str, Tensor]:
    """Return the probabilities that are compared, before any temperature."""
    head = trained.model.head
    found = {"mean": head.predict_proba(features)}
    if head.masked:
        logits = head.prediction_maps(features)
        o, log_rho = logits["classifier"], F.logsigmoid(logits["retain"])
        found |= {"exact": head.predict_proba(features, "exact"), "no-rho": o.softmax(-1)}
        found["rho2"] = (o + 2 * log_rho).softmax(-1)
    return found


def set_sizes(probs: Tensor, labels: Tensor, method: str, seed: int) -> list[dict[str, float]]:
    """Return coverage and mean size at each of COVERAGES, as means over random halves of the rows."""
    found = []
    for coverage in COVERAGES:
        measured, sizes = [], []
        for split in range(SPLITS):
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1000 * seed + split))
            fitting, testing = order.chunk(2)
            sets = PredictionSets(coverage, method, seed=split).fit(probs[fitting], labels[fitting])
            inside = sets.predict(probs[testing])
            measured.append(float(inside.gather(1, labels[testing, None]).double().mean()))
            sizes.append(float(inside.sum(-1).double().mean()))
        found.append({"coverage": coverage, "measured": mean(measured), "mean_size": mean(sizes)})
    return found


@torch.no_grad()
def outside(trained: TrainedModel, inside: Tensor) -> dict[str, dict[str, float]]:
    """Return AUROC and FPR at 95 % of each score against the outside rows of the data; nothing where it has none."""
    file = Path(trained.recipe.data.name)
    rows = read_npz_rows(file, labelled=False) if file.suffix == ".npz" else None
    if rows is None or not len(rows.outside):
        return {}
    unlike = trained.model.net(trained.prepare(torch.from_numpy(rows.values[rows.outside])))
    return tell_apart(trained.model.head, inside, unlike)


def measure(path: Path) -> list[dict[str, Any]]:
    """Measure one run."""
    trained = load_model(path)
    data = load_data(trained.recipe, run=path)
    features, labels = {}, {}
    with torch.no_grad():
        for part in ("validation", "test"):
            batches = list(trained.batches(getattr(data, part)))
            features[part] = torch.cat([trained.model.net(x) for x, _ in batches])
            labels[part] = torch.cat([y for _, y in batches])
    before = {part: probabilities(trained, rows) for part, rows in features.items()}
    temperatures, scaled = {}, {}
    for name, probs in before["validation"].items():
        temperatures[name] = fit_temperature(probs, labels["validation"], from_probs=True)
        scaled[name] = apply_temperature(before["test"][name], temperatures[name], from_probs=True)
    sets = {
        name: set_sizes(scaled[probs], labels["test"], method, trained.recipe.training.seed)
        for name, (method, probs) in METHODS.items()
        if probs in scaled
    }
    test = {name: metrics.evaluate(probs, labels["test"]) for name, probs in scaled.items()}
    return [{"temperatures": temperatures, "test": test, "sets": sets, "outside": outside(trained, features["test"])}]


def table(rows: Sequence[dict[str, Any]], coverage: float = 0.95) -> str:
    """Return the mean sizes at one coverage as Markdown: means over seeds, and their standard deviations."""
    lines = []
    for data, head in dict.fromkeys((row["data"], row["head"]) for row in rows):
        mine = [row["sets"] for row in rows if (row["data"], row["head"]) == (data, head)]
        sizes = {
            method: [one["mean_size"] for sets in mine for one in sets.get(method, []) if one["coverage"] == coverage]
            for method in METHODS
        }
        lines.append([data, head, *(mean_and_deviation(found, 3) for found in sizes.values())])
    return markdown(["data", "head", *METHODS], lines)


def main() -> None:
    """Measure the runs that are not there yet, and print the table of all."""
    arguments = parser(__doc__, "results/sets.jsonl")
    arguments.add_argument("runs", nargs="*", type=Path)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    rows = measure_runs(options.runs, options.out, measure)
    for coverage in COVERAGES:
        print(f"\nMean set size at {coverage:.0%} coverage, mean and standard deviation over seeds\n")
        print(table(rows, coverage))


if __name__ == "__main__":
    main()
