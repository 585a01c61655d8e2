"""Numbers in the pages are those of results/: tables are rendered again, and sentences compared."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

from benchmarks import harness, outside_inputs, own_data, set_sizes, what_rho_adds
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


def prose(text: str) -> str:
    """Return a page without generated tables and code."""
    text = docs_tables.TABLE.sub("", text)
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", docs_tables.PAGES, ids=lambda page: page.name)
def test_tables_and_sentences_of_a_page_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert docs_tables.render(text) == text, "run `make tables`"
    assert docs_tables.wrong_numbers(text) == []


@pytest.mark.parametrize("page", docs_tables.PAGES, ids=lambda page: page.name)
def test_every_interval_on_a_page_says_which_result_it_is(page: Path) -> None:
    if page.name in ELSEWHERE:
        pytest.skip(f"its numbers are those of {ELSEWHERE[page.name]}")
    text = prose(page.read_text(encoding="utf-8"))
    for row in re.findall(r"^\| .*rank correlation.*?(?=^[^|])", text, re.MULTILINE | re.DOTALL):
        text = text.replace(row, "")  # compared with confusion.json below
    unnamed = [text[max(0, m.start() - 30) : m.end() + 20] for m in re.finditer("±", docs_tables.INLINE.sub("", text))]
    assert not re.search("±", docs_tables.INLINE.sub("", text)), f"name the result in a comment: {unnamed}"


def test_the_tables_of_studies_are_those_of_their_runs() -> None:
    for section in re.split(r"^(?=# )", docs_tables.TABLES.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        assert docs_tables.tables_of(section[2:].partition("\n")[0]) == section.rstrip() + "\n", "run `make tables`"


def test_what_rho_adds_is_the_table_of_the_results() -> None:
    rows = [json.loads(line) for line in (ROOT / "results/rho.jsonl").read_text().splitlines()]
    assert what_rho_adds.table(rows) in (ROOT / "docs" / "what-rho-adds.md").read_text(encoding="utf-8")


def test_the_price_of_a_softmax_is_the_table_of_the_benchmarks() -> None:
    names = ("scale", "compiled", "two-threads/compiled", "growth", "two-threads/growth", "estimator")
    stored = [ROOT / "results" / "bench" / f"{name}.json" for name in names]
    assert harness.markdown(*stored) in (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


def test_what_photographs_cost_and_unfreezing_gains() -> None:
    page = (ROOT / "docs" / "photos-and-texts.md").read_text(encoding="utf-8")
    unfreeze, embedding = (
        [json.loads(line) for line in (ROOT / f"results/{name}.jsonl").read_text().splitlines()]
        for name in ("unfreeze", "embedding")
    )
    for method, shown in (("frozen", "frozen"), ("unfreeze 2", "`--unfreeze 2`")):
        rows = [row for row in unfreeze if row["method"] == method]
        error, nll, ece, aurc, seconds = (
            statistics.mean(row[name] for row in rows) for name in ("error", "nll", "ece", "aurc", "cpu_seconds")
        )
        assert f"| {shown} | {100 * error:.1f} | {nll:.3f} | {100 * ece:.1f} | {aurc:.3f} | {seconds:.1f} |" in page
    for row in embedding:
        assert f" {row['processor_ms']:.1f} ms" in page, row["kind"]


OWN_DATA = [json.loads(line) for line in (ROOT / "results/own-data.jsonl").read_text().splitlines()]
OURS = ("dropmax train", "DropMaxClassifier()")
LOGISTIC, FOREST = "LogisticRegression, C by cross-validation", "RandomForestClassifier(300)"


def own_data_by_seed(data: str, method: str, metric: str) -> dict[int, float]:
    return {row["seed"]: row[metric] for row in OWN_DATA if (row["data"], row["method"]) == (data, method)}


def test_own_data_are_the_tables_of_the_results() -> None:
    page = (ROOT / "docs" / "photos-and-texts.md").read_text(encoding="utf-8")
    assert own_data.table(OWN_DATA) in page


def test_what_is_said_of_own_data_is_so() -> None:
    """The sentences of docs/photos-and-texts.md above those tables, and the one on wine of docs/sklearn.md."""

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

    page = " ".join((ROOT / "docs" / "photos-and-texts.md").read_text(encoding="utf-8").split())
    recipe, estimator, logistic = (
        {data: f"{100 * mean(data, method, 'error'):.2f} %" for data in ("iris", large[0])}
        for method in (*OURS, LOGISTIC)
    )
    assert (
        f"{estimator['iris']} for the estimator and {recipe['iris']} for the recipe, against {logistic['iris']}" in page
    )
    assert f"{recipe[large[0]]} and {estimator[large[0]]} against {logistic[large[0]]} for logistic regression" in page
    assert f"lowest error, {100 * mean('mnist-1k', FOREST, 'error'):.2f} %" in page
    recipe_s, estimator_s, logistic_s = (
        ", ".join(f"{mean(data, method, 'cpu_seconds'):.0f}" for data in large) for method in (*OURS, LOGISTIC)
    )
    assert f"the recipe {recipe_s} seconds of processor time, the estimator {estimator_s}, and logistic" in page
    assert f"cross-validation {logistic_s}." in page
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
    page = (ROOT / "docs" / "calibration.md").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in (ROOT / "results/sets.jsonl").read_text().splitlines()]
    for coverage in (0.95, 0.99):
        assert set_sizes.table(rows, coverage).replace("cub-efficientnet-lite0", "cub features") in page
    for head in ("softmax", "dropmax"):
        found = [row["outside"] for row in rows if (row["data"], row["head"]) == ("clinc150", head)]
        for kind in found[0]:
            (line,) = re.findall(rf'^\| `"{kind}"`.*$', page, re.MULTILINE)
            areas, rates = ([one[kind][name] for one in found] for name in ("auroc", "fpr95"))
            assert f"{statistics.mean(areas):.3f} ± " in line
            assert f"{100 * statistics.mean(rates):.1f} ± {100 * statistics.stdev(rates):.1f} %" in line


def test_inputs_of_no_class_are_the_tables_of_the_results() -> None:
    page = (ROOT / "docs" / "calibration.md").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in (ROOT / "results/outside.jsonl").read_text().splitlines()]
    for table in (outside_inputs.table(rows), outside_inputs.shares(rows)):
        assert table.replace("cub-efficientnet-lite0", "cub features") in page


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
    page = (ROOT / "docs/many-classes.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "results/many-classes/cifar-100-5k/confusion.json").read_text())["rows"]
    found = {row["variant"]: row for row in rows}
    for title, variant in (("printed", "dropmax-printed"), ("default", "dropmax")):
        line = next(line for line in page.splitlines() if line.startswith(f"| {title} | ") and "0.5" in line)
        shown = [float(number) for number in re.findall(r"\d\.\d+", line)]
        row = found[variant]
        parts = ("rho_target", "rho_same_superclass", "rho_elsewhere")
        expected = [row["rank_correlation"]["mean"], row["rank_correlation"]["half_width"]]
        assert shown == pytest.approx([*expected, *(row[part]["mean"] for part in parts)], abs=5.1e-4)
