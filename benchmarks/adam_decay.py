"""How much of Adam's step is weight decay? ``python -m benchmarks.adam_decay OUT``.

For a study whose runs were kept (``dropmax reproduce ... --keep-runs --out OUT``) and trained with Adam. There the
decay is part of the gradient, g + decay * w, and is divided by the root of the running mean of its square, v:

    w <- w - rate * (mean of g + decay * w) / (sqrt(v) + 1e-8).

So the pull of the decay on a weight is decay * |w| / sqrt(v), in steps of the learning rate, and grows as gradients
vanish. Of the largest matrix of each run, at its last epoch: the norm, the root mean square of v, and the median pull.
Written to ``OUT/decay.json`` and printed as the table of docs/results.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from dropmax.lab.experiments import Store
from dropmax.workbench.files import write_atomically
from dropmax.workbench.provenance import provenance
from dropmax.workbench.training import load_model
from dropmax.workbench.training.rundir import RunDirectory
from dropmax.workbench.training.session import make_optimizer


def measure(path: Path) -> dict[str, float]:
    """Return what the last checkpoint of one run says of its largest matrix."""
    trained, state = load_model(path), RunDirectory.open(path).load_checkpoint()
    if state is None or trained.recipe.training.optimizer != "adam":
        raise SystemExit(f"{path} has no checkpoint of a run with Adam")
    optimizer = make_optimizer(trained.model, trained.recipe)
    optimizer.load_state_dict(state["optimizer"])
    group, weight = max(
        ((group, p) for group in optimizer.param_groups for p in group["params"]), key=lambda pair: pair[1].numel()
    )
    moments = optimizer.state[weight]
    square = moments["exp_avg_sq"] / (1 - group["betas"][1] ** float(moments["step"]))
    pull = group["weight_decay"] * weight.abs() / (square.sqrt() + group["eps"])
    return {
        "norm": weight.norm().item(),
        "gradient": square.mean().sqrt().item(),
        "pull": pull.median().item(),
    }


def rows(store: Store) -> list[dict[str, Any]]:
    """Return one row for each variant: the means over its seeds."""
    plan, found = store.plan(), []
    for group in plan.groups:
        values = [measure(store.model(job)) for job in group.run_jobs({}, plan.runs)]
        means = {name: sum(value[name] for value in values) / len(values) for name in values[0]}
        decay = group.recipe.training.weight_decay
        found.append({"variant": group.variant, "decay": decay, "seeds": plan.runs, **means})
    return found


def table(rows: list[dict[str, Any]], titles: dict[str, str]) -> str:
    """Return the rows of these variants as Markdown."""
    lines = ["| | weight decay | norm of the weights | size of a gradient | pull of the decay |", "|---" * 5 + "|"]
    by_variant = {row["variant"]: row for row in rows}
    for variant, title in titles.items():
        row = by_variant[variant]
        numbers = f"{row['decay']:g} | {row['norm']:.1f} | {row['gradient']:.1e} | {row['pull']:.3f}"
        lines.append(f"| {title} | {numbers} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="a directory of `dropmax reproduce --keep-runs`")
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = Store(options.out)
    found = rows(store)
    command = " ".join(["python -m benchmarks.adam_decay", *sys.argv[1:]])
    content = {"rows": found, "provenance": provenance(command, list(range(store.plan().runs)))}
    write_atomically(options.out / "decay.json", json.dumps(content, indent=1) + "\n")
    print(table(found, {row["variant"]: row["variant"] for row in found}))


if __name__ == "__main__":
    main()
