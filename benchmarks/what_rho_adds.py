"""Does rho know anything the probabilities do not? ``python -m benchmarks.what_rho_adds DATA [DATA ...] [--seeds N]``.

For each data set and seed it trains DropMax (the own-features recipe; released for mnist-1k) and asks three questions
of the test rows. What is learned on one half of them is measured on the other, and the other way round:

- **Being wrong**: a logistic regression predicts from the five highest log-probabilities and the entropy whether the
  answer is wrong; another one also sees rho of those five classes and the sum of rho. ``bits`` is what the second saves
  per row in bits, a lower bound of the mutual information between rho and being wrong given the probabilities.
- **Confidence**: the AURC of those two scores, and of the plain maximum probability.
- **A second look**: probabilities proportional to ``exp(alpha o + beta log rho)``. ``alpha = beta`` is the mean
  prediction with a temperature; a free beta is a second stage that may trust rho more, or less.

Results are appended to a file, one line per data set and seed; what is there already is not done again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from benchmarks.rows import append, markdown, parser, read
from dropmax.lab.statistics import t_interval
from dropmax.workbench.data import load
from dropmax.workbench.recipes import load_recipe
from dropmax.workbench.training import load_model, train

TOP = 5


def outputs(data: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Train DropMax and return class logits, retain logits and labels of the test rows."""
    if data == "mnist-1k":
        recipe = load_recipe(data, "released")
    else:
        recipe = load_recipe("own-features").override({"data.name": data})
    recipe = recipe.override({"training.seed": seed})
    with tempfile.TemporaryDirectory() as folder:
        run = train(recipe, Path(folder) / "run", quiet=True)
        trained = load_model(run.path)
        head: Any = trained.model.head
        parts = []
        with torch.no_grad():
            for x, y in trained.batches(load(data).test):
                features = trained.model.net(x)
                parts.append((head.classifier(features), head.retain(features), y))
    o, a, y = (torch.cat(part) for part in zip(*parts, strict=True))
    return o.double(), a.double(), y


def halves(rows: int, seed: int) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    order = np.random.default_rng(seed).permutation(rows)
    first, second = order[: rows // 2], order[rows // 2 :]
    yield first, second
    yield second, first


def aurc(score: np.ndarray[Any, Any], wrong: np.ndarray[Any, Any]) -> float:
    """Return the mean error of the rows kept, over all numbers of them, where the highest scores are rejected first."""
    kept = wrong[np.argsort(score, kind="stable")]
    return float((kept.cumsum() / np.arange(1, len(kept) + 1)).mean())


def being_wrong(log_probs: Tensor, rho: Tensor, y: Tensor, seed: int) -> dict[str, float]:
    """Return how well being wrong is predicted without and with rho."""
    best = log_probs.topk(TOP, -1)
    entropy = -(log_probs.exp() * log_probs).sum(-1, keepdim=True)
    plain = torch.cat([best.values.clamp_min(-30), entropy], -1).numpy()
    more = np.concatenate([plain, rho.gather(-1, best.indices).numpy(), rho.sum(-1, keepdim=True).numpy()], 1)
    wrong = (best.indices[:, 0] != y).numpy()
    score = {"plain": np.zeros(len(y)), "rho": np.zeros(len(y))}
    for fit, judge in halves(len(y), seed):
        for name, inputs in (("plain", plain), ("rho", more)):
            model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)).fit(inputs[fit], wrong[fit])
            score[name][judge] = model.predict_proba(inputs[judge])[:, 1]
    found = {"wrong": float(wrong.mean())}
    for name, x in score.items():
        found[f"bits.{name}"] = float(log_loss(wrong, x)) / np.log(2)
        found[f"auroc.{name}"] = float(roc_auc_score(wrong, x))
        found[f"aurc.{name}"] = aurc(x, wrong)
    found["auroc.max-prob"] = float(roc_auc_score(wrong, -log_probs.amax(-1).numpy()))
    found["aurc.max-prob"] = aurc(-log_probs.amax(-1).numpy(), wrong)
    return found


def second_look(o: Tensor, log_rho: Tensor, y: Tensor, seed: int) -> dict[str, float]:
    """Return error and NLL of the mean prediction with a temperature, and with separate weights of o and log rho."""

    def logits(weights: Any, rows: Any) -> Tensor:
        return float(weights[0]) * o[rows] + float(weights[-1]) * log_rho[rows]

    found = {}
    for name, count in (("tied", 1), ("free", 2)):
        judged, betas = torch.zeros_like(o), []
        for fit, judge in halves(len(y), seed):
            weights = minimize(lambda w, fit=fit: float(cross_entropy(logits(w, fit), y[fit])), np.ones(count)).x
            judged[judge] = logits(weights, judge)
            betas.append(weights[-1] / weights[0])
        found[f"nll.{name}"] = float(cross_entropy(judged, y))
        found[f"error.{name}"] = float((judged.argmax(-1) != y).double().mean())
    return {**found, "beta/alpha": float(np.mean(betas))}


def measure(data: str, seed: int) -> dict[str, float]:
    o, a, y = outputs(data, seed)
    log_rho = logsigmoid(a)
    return {
        **being_wrong((o + log_rho).log_softmax(-1), a.sigmoid(), y, seed),
        **second_look(o - o.amax(-1, keepdim=True), log_rho, y, seed),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown table of docs/what-rho-adds.md: paired differences with 95 % t-intervals."""
    columns = [
        ("bits.rho", "bits.plain", -1, 4),
        ("auroc.rho", "auroc.plain", 1, 4),
        ("aurc.rho", "aurc.plain", 1000, 2),
        ("nll.free", "nll.tied", 1, 4),
        ("error.free", "error.tied", 100, 2),
    ]
    lines = []
    for data in dict.fromkeys(row["data"] for row in rows):
        mine = [row for row in rows if row["data"] == data]
        cells = [
            _difference([scale * (row[with_rho] - row[without]) for row in mine], digits)
            for with_rho, without, scale, digits in columns
        ]
        lines.append([data, len(mine), *cells])
    head = ["data", "seeds", "bits saved", "AUROC", "AURC x 1000", "NLL, second look", "error %, second look"]
    return markdown(head, lines)


def _difference(values: Sequence[float], digits: int) -> str:
    mean, half_width = t_interval(values)
    return f"{mean:+.{digits}f} ± {half_width:.{digits}f}".replace("-", "−")


def main() -> None:
    arguments = parser(__doc__, "results/rho.jsonl")
    arguments.add_argument("data", nargs="+", help="mnist-1k, or feature files with a test split")
    arguments.add_argument("--seeds", type=int, default=5)
    options = arguments.parse_args()
    done = {(row["data"], row["seed"]) for row in read(options.out)}
    for data in options.data:
        for seed in range(options.seeds):
            about = {"data": Path(data).stem, "seed": seed}
            if tuple(about.values()) not in done:
                append(options.out, {**about, **measure(data, seed)}, [seed])


if __name__ == "__main__":
    main()
