"""Numbers in the pages are those of results/: tables are rendered again, and sentences compared."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, outside_inputs, own_data, set_sizes, what_rho_adds
from benchmarks.rows import read
from dropmax.lab.statistics import paired_by_seed
from tools import docs_tables

ROOT = Path(__file__).parents[2]

#: Pages whose intervals come from other measurements than ``dropmax reproduce``.
ELSEWHERE = {
    "calibration.md": "benchmarks.set_sizes, results/sets.jsonl, compared below",
    "what-rho-adds.md": "benchmarks.what_rho_adds, results/rho.jsonl, compared below",
    "photos-and-texts.md": "benchmarks.own_data, results/own-data.jsonl, compared below",
    "export.md": "a model card shown as an example",
}


def results(name: str) -> list[dict[str, Any]]:
    return read(ROOT / "results" / f"{name}.jsonl")


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", docs_tables.PAGES, ids=lambda path: path.name)
def test_tables_and_sentences_of_a_page_are_those_of_the_results(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert docs_tables.render(text) == text, "run `make tables`"
    assert docs_tables.wrong_numbers(text) == []


@pytest.mark.parametrize("path", docs_tables.PAGES, ids=lambda path: path.name)
def test_every_interval_on_a_page_says_which_result_it_is(path: Path) -> None:
    if path.name in ELSEWHERE:
        pytest.skip(f"its numbers are those of {ELSEWHERE[path.name]}")
    # No generated tables, no code, and no table of rank correlations: that is compared with confusion.json below.
    text = docs_tables.INLINE.sub("", docs_tables.TABLE.sub("", path.read_text(encoding="utf-8")))
    for other in (r"^```.*?^```$", r"^\| .*rank correlation.*?(?=^[^|])"):
        text = re.sub(other, "", text, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(".{0,30}±.{0,20}", text) == [], "name the result in a comment"


def test_the_tables_of_studies_are_those_of_their_runs() -> None:
    for section in re.split(r"^(?=# )", docs_tables.TABLES.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        assert docs_tables.tables_of(section[2:].partition("\n")[0]) == section.rstrip() + "\n", "run `make tables`"


def test_what_rho_adds_is_the_table_of_the_results() -> None:
    assert what_rho_adds.table(results("rho")) in page("what-rho-adds")


def test_the_price_of_a_softmax_is_the_table_of_the_benchmarks() -> None:
    names = ("scale", "compiled", "two-threads/compiled", "growth", "two-threads/growth", "estimator")
    stored = [ROOT / "results" / "bench" / f"{name}.json" for name in names]
    assert harness.markdown(*stored) in page("scale")


def test_what_photographs_cost_and_unfreezing_gains() -> None:
    text = page("photos-and-texts")
    for method, shown in (("frozen", "frozen"), ("unfreeze 2", "`--unfreeze 2`")):
        rows = [row for row in results("unfreeze") if row["method"] == method]
        error, nll, ece, aurc, seconds = (
            statistics.mean(row[name] for row in rows) for name in ("error", "nll", "ece", "aurc", "cpu_seconds")
        )
        assert f"| {shown} | {100 * error:.1f} | {nll:.3f} | {100 * ece:.1f} | {aurc:.3f} | {seconds:.1f} |" in text
    for row in results("embedding"):
        assert f" {row['processor_ms']:.1f} ms" in text, row["kind"]


OWN_DATA = results("own-data")
OURS = ("dropmax train", "DropMaxClassifier()")
LOGISTIC, FOREST = "LogisticRegression, C by cross-validation", "RandomForestClassifier(300)"


def own_data_by_seed(data: str, method: str, metric: str) -> dict[int, float]:
    return {row["seed"]: row[metric] for row in OWN_DATA if (row["data"], row["method"]) == (data, method)}


def test_tables_and_sentences_on_own_data_are_those_of_the_results() -> None:
    """The tables of docs/photos-and-texts.md, the sentences above them, and the one on wine of docs/sklearn.md."""

    def mean(data: str, method: str, metric: str) -> float:
        return statistics.mean(own_data_by_seed(data, method, metric).values())

    def lowest(data: str, method: str, metric: str) -> bool:
        rivals = {row["method"] for row in OWN_DATA if row["data"] == data} - set(OURS)
        return all(mean(data, method, metric) < mean(data, rival, metric) for rival in rivals)

    both = [(method, metric) for method in OURS for metric in ("error", "nll")]
    large = ("cub-efficientnet-lite0.npz", "banking77.npz", "clinc150.npz")
    for data in (*large, "banking77.npz:10", "digits"):
        assert all(lowest(data, method, metric) for method, metric in both), data
    assert lowest("wine", "DropMaxClassifier()", "error")
    assert lowest("wine", "DropMaxClassifier()", "nll")
    assert mean("wine", "dropmax train", "error") == pytest.approx(mean("wine", LOGISTIC, "error"))
    assert mean("wine", "dropmax train", "nll") > mean("wine", LOGISTIC, "nll")
    for method in OURS:
        assert mean("iris", method, "error") > mean("iris", LOGISTIC, "error")
        assert mean("iris", method, "nll") < mean("iris", LOGISTIC, "nll")
        assert mean("mnist-1k", method, "error") < mean("mnist-1k", LOGISTIC, "error")
        assert mean("mnist-1k", method, "nll") > mean("mnist-1k", LOGISTIC, "nll")
        assert mean("mnist-1k", FOREST, "error") < mean("mnist-1k", method, "error")

    assert own_data.table(OWN_DATA) in page("photos-and-texts")
    text = " ".join(page("photos-and-texts").split())
    recipe, estimator, logistic = (
        {data: f"{100 * mean(data, method, 'error'):.2f} %" for data in ("iris", large[0])}
        for method in (*OURS, LOGISTIC)
    )
    assert (
        f"{estimator['iris']} for the estimator and {recipe['iris']} for the recipe, against {logistic['iris']}" in text
    )
    assert f"{recipe[large[0]]} and {estimator[large[0]]} against {logistic[large[0]]} for logistic regression" in text
    assert f"lowest error, {100 * mean('mnist-1k', FOREST, 'error'):.2f} %" in text
    recipe_s, estimator_s, logistic_s = (
        ", ".join(f"{mean(data, method, 'cpu_seconds'):.0f}" for data in large) for method in (*OURS, LOGISTIC)
    )
    assert f"the recipe {recipe_s} seconds of processor time, the estimator {estimator_s}, and logistic" in text
    assert f"cross-validation {logistic_s}." in text
    for data in ("wine", "breast_cancer", "iris", "digits"):
        for method, most in ((LOGISTIC, 0.15), ("DropMaxClassifier()", 2), ("dropmax train", 4)):
            assert mean(data, method, "cpu_seconds") < most


def test_which_comparisons_of_own_data_with_logistic_regression_are_settled() -> None:
    settled = set()
    for data in ("wine", "breast_cancer", "iris", "digits", "mnist-1k", "banking77.npz:10"):
        for method in OURS:
            for metric in ("error", "nll"):
                pair = (own_data_by_seed(data, name, metric) for name in (method, LOGISTIC))
                found = paired_by_seed(*pair)
                assert found is not None
                if abs(found.mean) > found.half_width:
                    settled.add((data, method, metric))
    recipe, estimator = OURS
    assert settled == {
        ("digits", recipe, "error"),
        ("mnist-1k", recipe, "error"),
        *((data, estimator, metric) for data in ("digits", "banking77.npz:10") for metric in ("error", "nll")),
        *((data, recipe, metric) for data in ("iris", "banking77.npz:10") for metric in ("error", "nll")),
    }


def test_sizes_of_prediction_sets_and_outside_scores_are_those_of_the_results() -> None:
    text = page("calibration").replace("cub features", "cub-efficientnet-lite0")
    rows, outside = results("sets"), results("outside")
    tables = [set_sizes.table(rows, 0.95), set_sizes.table(rows, 0.99)]
    for table in (*tables, outside_inputs.table(outside), outside_inputs.shares(outside)):
        assert table in text
    for head in ("softmax", "dropmax"):
        found = [row["outside"] for row in rows if (row["data"], row["head"]) == ("clinc150", head)]
        for kind in found[0]:
            (line,) = re.findall(rf'^\| `"{kind}"`.*$', text, re.MULTILINE)
            areas, rates = ([one[kind][name] for one in found] for name in ("auroc", "fpr95"))
            assert f"{statistics.mean(areas):.3f} ± " in line
            assert f"{100 * statistics.mean(rates):.1f} ± {100 * statistics.stdev(rates):.1f} %" in line


def test_a_number_that_is_not_true_is_found() -> None:
    true = "2.64 ± 0.30<!-- table1/dropmax error -->"
    assert docs_tables.wrong_numbers(true) == []
    for wrong in (true.replace("2.64", "2.46"), true.replace("0.30", "0.20"), true.replace("dropmax", "softmax")):
        assert len(docs_tables.wrong_numbers(wrong)) == 1
    less = "−1.05 ± 0.13<!-- table1/dropmax less table1/softmax error -->"
    assert docs_tables.wrong_numbers(less) == []
    assert docs_tables.wrong_numbers(less.replace("−", "+"))
    with pytest.raises(ValueError, match="no runs of 'dropmix'"):
        docs_tables.wrong_numbers("2.64<!-- table1/dropmix error -->")


def test_what_heads_are_recommended_for_is_so() -> None:
    """The claims of docs/heads.md and README.md that are words, not numbers."""
    names = ["softmax", "sparsemax", "sampled-softmax", "random-dropmax", "deterministic-attention"]
    names += ["deterministic-dropmax", "dropmax-qp", "dropmax"]
    means = {m: {n: docs_tables.mean_and_half(f"table1/{n}", m)[0] for n in names} for m in ("error", "nll", "ece")}
    lowest = {metric: min(found, key=found.__getitem__) for metric, found in means.items()}
    assert lowest["error"] == lowest["nll"] == "dropmax"
    assert lowest["ece"] != "dropmax"
    assert 0.2 < 1 - means["error"]["dropmax"] / means["error"]["softmax"] < 0.3, "a quarter fewer errors"
    six = names[1:-1]
    assert min(six, key=means["error"].__getitem__) == "sparsemax"
    assert min(six, key=means["nll"].__getitem__) == "random-dropmax"
    for name in names[:-1]:
        found = docs_tables.difference("table1/dropmax", f"table1/{name}", "error")
        assert found.mean < 0
        assert 7 * found.p_value < 0.05, "significant after the strictest correction for seven comparisons"


def test_the_table_of_rank_correlations_is_that_of_confusion_json() -> None:
    lines = page("many-classes").splitlines()
    rows = json.loads((ROOT / "results/many-classes/cifar-100-5k/confusion.json").read_text())["rows"]
    found = {row["variant"]: row for row in rows}
    for title, variant in (("printed", "dropmax-printed"), ("default", "dropmax")):
        line = next(line for line in lines if line.startswith(f"| {title} | ") and "0.5" in line)
        shown = [float(number) for number in re.findall(r"\d\.\d+", line)]
        row = found[variant]
        parts = ("rho_target", "rho_same_superclass", "rho_elsewhere")
        expected = [row["rank_correlation"]["mean"], row["rank_correlation"]["half_width"]]
        assert shown == pytest.approx([*expected, *(row[part]["mean"] for part in parts)], abs=5.1e-4)


def test_why_the_printed_objective_is_behind_in_the_papers_recipe() -> None:
    """The shares of rivals that q keeps while training, which docs/results.md gives as the cause."""

    def kept(study: str, variant: str) -> list[float]:
        runs = [run for run in docs_tables.records(f"table1/{study}") if run.variant == variant]
        return [run.curve[-1]["masks"]["posterior_rivals"] for run in runs]

    printed = kept("mnist-1k-paper-600", "printed") + kept("mnist-1k-paper-600", "printed-standardised")
    assert all(0.025 <= share < 0.035 for share in printed), "three in a hundred"
    assert kept("mnist-1k-paper-why", "default") == [pytest.approx(0.38, abs=0.005)]


def test_by_likelihood_the_data_efficient_rows_would_all_have_the_strongest_decay() -> None:
    tuning = docs_tables.Store(ROOT / "results/data-efficient/cifar-10").runs("tune")
    for variant in ("softmax", "smoothing", "dropout", "dropmax"):
        best = min((run for run in tuning if run.variant == variant), key=lambda run: run.validation["mean"]["nll"])
        assert best.point["training.weight_decay"] == max(run.point["training.weight_decay"] for run in tuning)
