"""The report: what each section shows, put into the template ``report.html.j2``."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from torch import Tensor

from dropmax import metrics
from dropmax.errors import InvalidValue
from dropmax.lab.figures import confidence, training
from dropmax.lab.figures.runs import Run, Subject, by_data, data_name
from dropmax.lab.report.compare import LEVEL, METRICS, Comparison, compare
from dropmax.lab.report.sections import chart, classes_section, disagreements, hardest_section
from dropmax.workbench.evaluation import answer
from dropmax.workbench.provenance import commit, versions

__all__ = ["environment", "make_report"]


def make_report(runs: Sequence[Run], command: str) -> str:
    """Return a report on runs as one HTML page that needs nothing else; several are compared, data set by data set."""
    if not runs:
        raise InvalidValue("name at least one run to report on")
    names = list(dict.fromkeys(data_name(run.recipe) for run in runs))
    heads = list(dict.fromkeys(run.head.name for run in runs))
    recipes = {f"{data_name(run.recipe)}: {run.label}": run for run in reversed(runs)}
    page: str = environment().get_template("report.html.j2").render(
        title=f"{', '.join(heads)} on {', '.join(names)}",
        groups=[_group(members) for members in by_data(runs).values()],
        runs=[_origin(run) for run in runs],
        recipes=[(title, run.seed, run.recipe.to_toml()) for title, run in reversed(recipes.items())],
        command=command,
        commit=(commit() or "unknown")[:12],
        versions=", ".join(f"{k} {v}" for k, v in versions().items()),
        metrics=METRICS,
        level=LEVEL,
        style=resources.files(__package__).joinpath("report.css").read_text(encoding="utf-8"),
    )  # fmt: skip
    return page


def environment() -> Any:
    """Return the Jinja2 environment of the report: everything is escaped, and characters that show nothing go."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("dropmax.lab.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    found.filters |= {"cut": _cut, "portable": _portable}
    return found


def _visible(value: Any) -> Any:
    if type(value) is not str:  # markup of our own, and numbers
        return value
    return "".join(c for c in value if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs", "Co"))


def _cut(text: str, limit: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _portable(text: str) -> str:
    """Return a text whose absolute paths are cut to their last part: a report is sent around."""
    return re.sub(r"""(?<![\w./:<-])(?:[A-Za-z]:[\\/]|/)(?:[^\s'"\\/]+[\\/])*([^\s'"\\/]+)""", r"…/\1", text)


def _group(runs: Sequence[Run]) -> dict[str, Any]:
    found = compare(runs)
    main = next((run for run in runs if run.has_masks), runs[0])
    subject = Subject(runs)
    logged = all(any("validation" in row for row in run.log) for run in runs)
    return {
        "name": data_name(runs[0].recipe),
        "found": found,
        "single": len(runs) == 1,
        "alone": [m for m in found.methods if len(found.cells[m, "error"].values) == 1],
        "unpaired": any(one.paired is None for one in found.differences.values()),
        "modes": _modes(found),
        "main": {"path": main.path.name, "masks": main.has_masks, "classes": main.classes},
        "classes": classes_section(main),
        "disagreements": disagreements(runs),
        "hardest": hardest_section(main),
        "examples": len(runs[0].test),
        "data": runs[0].data,
        "methods": [_method(method, members) for method, members in found.methods.items()],
        "reliability": chart(confidence.draw_reliability, subject, "Reliability diagrams"),
        "rejection": chart(confidence.draw_rejection, subject, "Accuracy against rejection"),
        "learning": chart(training.draw_convergence, subject, "Cross entropy in training") if logged else None,
        "masks": chart(training.draw_masks, subject, "Masks in training") if main.has_masks else None,
    }


def _modes(found: Comparison) -> list[dict[str, Any]]:
    """Compare the mean prediction with the exact sum over all masks, plain and, if all are calibrated, scaled."""
    rows = []
    for method, runs in found.methods.items():
        if not runs[0].has_masks:
            continue
        calibrations = [run.trained.calibration for run in runs if run.trained.calibration is not None]
        for mode, words in (("mean", "ρ in place of the masks"), ("exact", "exact sum over all masks")):
            probs = [answer(run.head, run.features(), mode=mode).probs for run in runs]
            rows.append({"method": method, "mode": words} | _averages(found, runs, probs))
            if len(calibrations) == len(runs):
                scaled = [one.apply(p, mode) for one, p in zip(calibrations, probs, strict=True)]
                rows.append({"method": method, "mode": f"{words}, with a temperature"} | _averages(found, runs, scaled))
    return rows


def _averages(found: Comparison, runs: Sequence[Run], probs: Sequence[Tensor]) -> dict[str, float]:
    measured = [metrics.evaluate(p, run.outputs.labels) for p, run in zip(probs, runs, strict=True)]
    return {name: sum(one[name] for one in measured) / len(measured) for name in found.metrics}


def _method(method: str, runs: Sequence[Run]) -> dict[str, Any]:
    recipe = runs[0].recipe
    return {
        "name": method,
        "network": _options(recipe.network),
        "weights": sum(p.numel() for p in runs[0].model.parameters()),
        "head": _options(recipe.head),
        "training": recipe.training,
        "seeds": ", ".join(str(run.seed) for run in runs),
    }


def _options(values: dict[str, object]) -> str:
    others = ", ".join(f"{key} = {value}" for key, value in values.items() if key != "name")
    return f"{values['name']}{f' ({others})' if others else ''}"


def _origin(run: Run) -> dict[str, str]:
    known = run.environment
    used, machine = known.get("versions", {}), known.get("machine", {})
    return {
        "name": Path(run.path).name,
        "command": str(known.get("command", "unknown")),
        "again": shlex.join(["dropmax", "train", "--recipe", f"{Path(run.path).name}/recipe.toml", "--out", "ANOTHER"]),
        "commit": str(known.get("commit") or "unknown")[:12],
        "date": str(known.get("date", "")),
        "versions": ", ".join(f"{k} {v}" for k, v in used.items()) if isinstance(used, dict) else str(used),
        "processor": str(machine.get("processor", "unknown")) if isinstance(machine, dict) else "unknown",
    }
