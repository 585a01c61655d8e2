"""Does rho know what is really confused? ``python -m benchmarks.confusion_tracking OUT [--base softmax]``.

For a table or study whose runs were kept (``dropmax reproduce ... --keep-runs --out OUT``): the rank correlation, over
all pairs of classes, between rho averaged over the test examples of a class and what the softmax of the same seed took
them for (:func:`dropmax.lab.diagnostics.confusion_tracking`). Where the data have superclasses, also the mean rho of
rivals inside and outside the superclass of the target. Written to ``OUT/confusion.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dropmax.errors import InvalidValue
from dropmax.heads.masked import MaskedHead
from dropmax.lab.diagnostics import confusion_tracking
from dropmax.lab.experiments import Store
from dropmax.lab.experiments.plan import Group, Job
from dropmax.lab.statistics import t_interval
from dropmax.workbench.evaluation import Outputs, predict
from dropmax.workbench.files import write_atomically
from dropmax.workbench.provenance import provenance
from dropmax.workbench.training import TrainedModel, load_data, load_model


def track(store: Store, base: str, data_dir: Path | None = None) -> list[dict[str, Any]]:
    """Return a row for each variant with masks."""
    plan = store.plan()
    rows = []
    for column in dict.fromkeys(group.data for group in plan.groups):
        groups = [group for group in plan.groups if group.data == column]
        found: dict[str, list[dict[str, float]]] = {}
        for seed in range(plan.runs):
            predicted = _answers(store, _job(groups, base, seed), data_dir)[1].probs.argmax(-1)
            for group in groups:
                trained, outputs, coarse = _answers(store, _job(groups, group.variant, seed), data_dir)
                if isinstance(trained.model.head, MaskedHead):
                    found.setdefault(group.variant, []).append(_row(outputs, predicted, coarse))
        for variant, values in found.items():
            summary = {name: _mean_and_half_width([value[name] for value in values]) for name in values[0]}
            rows.append({"data": column, "variant": variant, "seeds": plan.runs, **summary})
            print(f"{column} {variant}: " + ", ".join(f"{k} {v['mean']:.3f}" for k, v in summary.items()), flush=True)
    return rows


def _mean_and_half_width(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {"mean": values[0]}
    mean, half_width = t_interval(values)
    return {"mean": mean, "half_width": half_width}


def _row(outputs: Outputs, predicted: Tensor, coarse: tuple[int, ...] | None) -> dict[str, float]:
    rho, y = outputs.retain, outputs.labels
    target = nn.functional.one_hot(y, rho.shape[-1]).bool()
    row = {
        "rank_correlation": confusion_tracking(rho, y, predicted),
        "rho_target": rho[target].mean().item(),
        "rho_rivals": rho[~target].mean().item(),
    }
    if coarse is not None:
        group = torch.tensor(coarse)
        same = group[y, None] == group
        row |= {"rho_same_superclass": rho[same & ~target].mean().item(), "rho_elsewhere": rho[~same].mean().item()}
    return row


def _answers(store: Store, job: Job, data_dir: Path | None) -> tuple[TrainedModel, Outputs, tuple[int, ...] | None]:
    kept = store.model(job)
    if not kept.exists():
        raise InvalidValue(f"{kept} is not there: make the runs with `dropmax reproduce --keep-runs`")
    trained = load_model(kept)
    data = load_data(job.recipe, data_dir)
    return trained, predict(trained.model, trained.batches(data.test)), data.coarse


def _job(groups: Sequence[Group], variant: str, seed: int) -> Job:
    group = next((group for group in groups if group.variant == variant), None)
    if group is None:
        raise InvalidValue(f"there is no variant {variant!r}: name one of {', '.join(g.variant for g in groups)}")
    # Only its name and data matter here: the model knows the values that tuning chose.
    return group.run_jobs({}, seed + 1)[seed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="a directory of `dropmax reproduce --keep-runs`")
    parser.add_argument("--base", default="softmax", metavar="VARIANT", help="whose confusions (default: %(default)s)")
    parser.add_argument("--data-dir", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = Store(options.out)
    rows = track(store, options.base, options.data_dir)
    command = " ".join(["python -m benchmarks.confusion_tracking", *sys.argv[1:]])
    content = {"rows": rows, "provenance": provenance(command, list(range(store.plan().runs)))}
    write_atomically(options.out / "confusion.json", json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
