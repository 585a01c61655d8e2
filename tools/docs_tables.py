"""Numbers in the pages, from ``results/``: ``python tools/docs_tables.py`` writes them, a test checks them.

It also writes ``results/tables.md``, the tables of every study.

A table is written between two comments, and its first one says what is in it::

    <!-- table: STUDY | COLUMNS | ROWS -->
    ...
    <!-- end -->

STUDY is a directory below ``results/``. COLUMNS, separated by commas, are ``error``, ``nll``, ``ece``, ``aurc`` or
``brier``, with ``_scaled`` behind it after a fitted temperature; ``set_size`` or ``outside_auroc``; ``paper`` for the
paper's number; ``seeds``; ``chosen`` for what tuning chose; ``dropmax-error`` for the paired difference "dropmax less
this row". ROWS are ``variant=Name to show``; a variant of another study is ``study/variant=Name``,
``variant@exact=Name`` is another prediction mode, and ``[0-2]`` before the ``=`` limits the seeds.

``<!-- across: METRIC | REFERENCE | STUDY=Name, ... | variant=Name, ... -->`` makes one table of several studies: their
rows, the reference's mean, and how much less it is than each variant, paired over the seeds.

``<!-- edges: STUDY, STUDY -->`` before ``<!-- end -->`` is filled with a sentence: which winners of tuning lie on an
edge of their grids.

A number in a sentence is followed by a comment that names it: ``2.64 ± 0.30<!-- table1/dropmax error -->``, or for a
paired difference ``1.05 ± 0.13<!-- table1/softmax less table1/dropmax error -->``.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

from dropmax.lab.experiments import RunRecord, Store, make_table
from dropmax.lab.experiments.paper import PAPER
from dropmax.lab.experiments.render import FORMATS
from dropmax.lab.experiments.schedule import edges_of
from dropmax.lab.experiments.tables import DEFAULT_METRICS, METRICS, by_seed
from dropmax.lab.statistics import PairedDifference, paired_by_seed, t_interval

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "results" / "tables.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TABLE = re.compile(r"(<!-- (table|across|edges): (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
INLINE = re.compile(
    r"(?P<sign>[-+−]?)(?P<mean>\d+\.?\d*)(?: ± (?P<half>\d+\.?\d*))?(?: %)?\*{0,2}<!-- (?P<what>[^>]*?) -->"
)
#: Of studies that compare probabilities before and after a fitted temperature.
CALIBRATED_METRICS = ("error", "nll", "nll_scaled", "ece", "ece_scaled", "aurc", "aurc_scaled", "set_size")
TITLES = {name: metric.short for name, metric in METRICS.items()} | {"outside_auroc": "AUROC, outside"}
_DIGITS = {"error": 2, "nll": 3, "ece": 2, "aurc": 3, "brier": 3, "outside_auroc": 3}


@cache
def records(study: str) -> tuple[RunRecord, ...]:
    """Return the finished runs of a study."""
    if not (ROOT / "results" / study / "results.jsonl").exists():
        raise ValueError(f"there is no results/{study}/results.jsonl")
    return tuple(record for record in Store(ROOT / "results" / study).runs() if record.status == "done")


def values(row: str, metric: str) -> dict[int, float]:
    """Return a metric by seed, in the units of the tables, for ``study/variant`` or ``study/variant[0-2]``."""
    name, _, seeds = row.partition("[")
    name, _, mode = name.partition("@")
    study, _, variant = name.rpartition("/")
    chosen = [record for record in records(study) if record.variant == variant]
    if seeds:
        first, last = map(int, seeds.rstrip("]").split("-"))
        chosen = [record for record in chosen if first <= record.seed <= last]
    if not chosen:
        raise ValueError(f"results/{study} has no runs of {variant!r}")
    mode = mode or "mean"
    found = by_seed(chosen, metric, mode)
    if len(found) < len(chosen):
        raise ValueError(f"results/{study}: {variant} was not measured in {metric!r} of mode {mode!r} with every seed")
    return found


def difference(row: str, other: str, metric: str) -> PairedDifference:
    """Return ``row`` less ``other``, paired over the seeds both have."""
    found = paired_by_seed(values(row, metric), values(other, metric))
    if found is None:
        raise ValueError(f"{row} and {other} share no two seeds")
    return found


def mean_and_half(row: str, metric: str) -> tuple[float, float | None]:
    """Return the mean over the seeds, and half of its 95 % t-interval where there are two."""
    found = list(values(row, metric).values())
    return t_interval(found) if len(found) > 1 else (found[0], None)


def number(mean: float, half: float | None, digits: int, sign: str = "") -> str:
    """Return ``2.64 ± 0.30``."""
    return f"{mean:{sign}.{digits}f}" + ("" if half is None else f" ± {half:.{digits}f}")


def table(specification: str) -> str:
    """Return the table that a marker asks for."""
    study, columns_text, rows_text = _parts(specification)
    rows = {name if "/" in name else f"{study}/{name}": title for name, title in _named(rows_text).items()}
    columns = [column.strip() for column in columns_text.split(",")]
    body = [[title, *(_cell(study, row, column, list(rows)) for column in columns)] for row, title in rows.items()]
    return _markdown(["", *map(_title, columns)], body)


def _parts(specification: str) -> list[str]:
    return [part.strip() for part in " ".join(specification.split()).split("|")]


def _markdown(head: list[str], body: list[list[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in (head, *body)]
    return "\n".join([lines[0].replace("|  |", "| |", 1), "|---" * len(head) + "|", *lines[1:]]) + "\n"


def _named(text: str) -> dict[str, str]:
    """Return ``name=Title to show, ...`` as a dictionary. A comma ends a title only where a name and "=" follow."""
    return dict(part.strip().split("=", 1) for part in re.split(r",\s*(?=[\w./@+\[\]-]+=)", text))


def across(specification: str) -> str:
    """Return one metric of several studies: a reference's mean, and its paired difference from each variant."""
    column, reference, studies, variants = _parts(specification)
    names = _named(variants)
    _, metric, digits = _split(column)
    others = [variant for variant in names if variant != reference]
    body = []
    for study, title in _named(studies).items():
        base = f"{study}/{reference}"
        known = {record.variant for record in records(study)}
        less = [_less(base, f"{study}/{other}", metric, digits) if other in known else "" for other in others]
        body.append([title, number(*mean_and_half(base, metric), digits), *less])
    return _markdown([_title(metric), names[reference], *(f"less {names[other]}" for other in others)], body)


def _less(row: str, other: str, metric: str, digits: int) -> str:
    found = difference(row, other, metric)
    text = number(found.mean, found.half_width, digits, "+")
    return f"**{text}**" if abs(found.mean) > found.half_width else text


def _split(column: str) -> tuple[str, str, int]:
    """Return the reference of a difference (or nothing), the metric and its digits."""
    reference, _, metric = column.rpartition("-")
    if metric not in TITLES:
        raise ValueError(f"{column!r} is no column: see the top of tools/docs_tables.py")
    return reference, metric, _DIGITS.get(metric.removesuffix("_scaled"), 2)


def _title(column: str) -> str:
    plain = {"paper": "the paper's error %", "chosen": "chosen", "seeds": "seeds"}
    if column in plain:
        return plain[column]
    reference, metric, _ = _split(column)
    return f"{reference} less this: {TITLES[metric]}" if reference else TITLES[metric]


def _cell(study: str, row: str, column: str, rows: list[str]) -> str:
    variant = _name(row).rpartition("/")[2]
    if column == "paper":
        data = records(_name(row).rpartition("/")[0])[0].data
        paper = PAPER.get(variant, {}).get(data)
        return number(*paper, 2) if paper else ""
    if column == "seeds":
        return str(len(values(row, "error")))
    if column == "chosen":
        return _chosen(row)
    reference, metric, digits = _split(column)
    if reference:
        seeds = row.partition("[")[2]
        base = f"{study}/{reference}" + (f"[{seeds}" if seeds else "")
        return "" if base == row else _less(base, row, metric, digits)
    mean, half = mean_and_half(row, metric)
    is_best = mean <= min(mean_and_half(other, metric)[0] for other in rows)
    text = number(mean, half, digits)
    # Of an AUROC more is better.
    return f"**{text}**" if is_best and len(rows) > 1 and metric != "outside_auroc" else text


def _name(row: str) -> str:
    return re.split(r"[@\[]", row)[0]


def _chosen(row: str) -> str:
    study, _, variant = _name(row).rpartition("/")
    record = next(record for record in records(study) if record.variant == variant)
    tuned = list(record.point) or ["training.weight_decay", "training.learning_rate"]
    split = [name.split(".", 1) for name in tuned]
    return ", ".join(f"{key.replace('_', ' ')} {record.recipe[section].get(key, 0):g}" for section, key in split)


@cache
def _edges(study: str) -> dict[str, list[str]]:
    """Return which values of each variant's winner lie on an edge of its grid; of a study of one data set."""
    found = {group.variant: words for group, words in edges_of(Store(ROOT / "results" / study).plan(), records(study))}
    if not found:
        raise ValueError(f"results/{study} holds no rows that were tuned there")
    return found


def edge_sentence(studies: str) -> str:
    """Return a sentence on the winners of tuning in some studies that lie on an edge of their grids."""
    names = [name.strip() for name in studies.split(",")]
    rows = [
        (variant if len(names) == 1 else f"{variant} in `{name}`", words)
        for name in names
        for variant, words in _edges(name).items()
    ]
    count = sum(bool(words) for _, words in rows)
    if not count:
        return f"None of the {len(rows)} winners of tuning is on an edge of its grid.\n"
    rows_at: dict[str, list[str]] = {}
    for row, words in rows:
        for word in words:
            rows_at.setdefault(word, []).append(row)
    most_first = sorted(rows_at.items(), key=lambda item: -len(item[1]))
    if count > 12:  # too many to list: how often each value won
        shown = [f"{word} ({len(at)} times)" for word, at in most_first]
    else:
        shown = [f"{word} ({', '.join(at)})" for word, at in most_first]
    return f"{count} of {len(rows)} winners of tuning on an edge of its grid: {'; '.join(shown)}.\n"


def render(text: str) -> str:
    """Return a page with its tables written anew."""
    writers = {"table": table, "across": across, "edges": edge_sentence}
    return TABLE.sub(lambda match: match[1] + writers[match[2]](match[3]) + match[5], text)


def wrong_numbers(text: str) -> list[str]:
    """Say which numbers in sentences are not those of ``results/``."""
    problems = []
    for match in INLINE.finditer(text):
        what = " ".join(match["what"].split())
        rows, _, metric = what.rpartition(" ")
        row, _, other = rows.partition(" less ")
        mean, half = difference(row, other, metric)[:2] if other else mean_and_half(row, metric)
        places = len(match["mean"].partition(".")[2])
        shown = float(match["mean"]) * (-1 if match["sign"] in ("-", "−") else 1)
        claimed = [(shown, mean if match["sign"] or not other else abs(mean))]
        if match["half"] is not None:
            claimed.append((float(match["half"]), half if half is not None else -1.0))
        if any(abs(said - true) > 0.5001 * 10**-places for said, true in claimed):
            problems.append(f"{match[0]}: measured {number(mean, half, max(places, 2))}")
    return problems


def tables_of(study: str) -> str:
    """Return the tables of a study, as ``dropmax reproduce`` prints them, under its name."""
    store = Store(ROOT / "results" / study)
    is_scaled = all("nll_scaled" in record.test["mean"] for record in records(study))
    metrics = CALIBRATED_METRICS if is_scaled else DEFAULT_METRICS
    text = FORMATS["md"]([make_table(store, metric, modes=("mean", "exact")) for metric in metrics])
    return f"# {study}\n\n" + re.sub("^#", "##", text, flags=re.MULTILINE).strip() + "\n"


def main() -> int:
    """Write the tables of every page and of every study, and report numbers in sentences that are not true."""
    wrong = 0
    studies = sorted(str(file.parent.relative_to(ROOT / "results")) for file in ROOT.glob("results/**/results.jsonl"))
    TABLES.write_text("\n".join(map(tables_of, studies)), encoding="utf-8")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = render(text)
        if new != text:
            page.write_text(new, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: tables written")
        for problem in wrong_numbers(new):
            print(f"{page.relative_to(ROOT)}: {problem}")
            wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
