"""Two variants compared in pairs, and the page of a study."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from scipy import stats

from dropmax.cli.report import report
from dropmax.cli.reproduce import reproduce
from dropmax.errors import InvalidValue
from dropmax.lab.experiments import Store, pictures, plan_table
from dropmax.lab.experiments.compare import compare, make_page, print_comparison
from dropmax.lab.experiments.records import failure
from dropmax.workbench import style
from tests.lab.experiments.results import fill, result

ERRORS = {
    ("softmax", "mnist-1k"): [0.0418, 0.0402, 0.0431, 0.0395],
    ("dropmax", "mnist-1k"): [0.0288, 0.0275, 0.0301, 0.0290],
    ("softmax", "mnist-5k"): [0.0218, 0.0202, 0.0231, 0.0195],
    ("dropmax", "mnist-5k"): [0.0210, 0.0212, 0.0221, 0.0200],
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    plan = plan_table(["mnist-1k", "mnist-5k"], heads=["softmax", "sparsemax", "dropmax"], runs=4, tune=False)
    return fill(tmp_path / "out", plan, ERRORS, command="dropmax reproduce <b>")


def test_differences_are_paired_and_corrected(store: Store) -> None:
    found = compare(store, "dropmax", "softmax", ["error", "nll"])
    assert [(each.data, each.metric) for each in found] == [
        (data, metric) for data in ("mnist-1k", "mnist-5k") for metric in ("error", "nll")
    ]
    raw = []
    for each in found:
        a, b = ([100 * value for value in ERRORS[head, each.data]] for head in ("dropmax", "softmax"))
        if each.metric == "nll":
            a, b = ([value / 10 for value in values] for values in (a, b))
        test = stats.ttest_rel(a, b)
        low, high = test.confidence_interval()
        assert (each.mean - each.half_width, each.mean + each.half_width) == pytest.approx((low, high))
        assert each.p_value == pytest.approx(test.pvalue)
        raw.append(test.pvalue)
    first = sorted(range(4), key=raw.__getitem__)[0]
    assert found[first].corrected == pytest.approx(4 * raw[first])
    assert [each.is_significant for each in found] == [True, True, False, False]


def test_only_seeds_that_both_have_count(store: Store) -> None:
    job = store.plan().groups[0].run_jobs({}, 4)[3]
    store.append(failure(job, "bad luck"))
    assert list(compare(store, "dropmax", "softmax", ["error"])[0].values) == [0, 1, 2]


@pytest.mark.parametrize(
    ("a", "b", "metrics", "message"),
    [
        ("dropmix", "softmax", ["error"], "unknown variant 'dropmix': did you mean 'dropmax'"),
        ("dropmax", "dropmax", ["error"], "two different variants"),
        ("dropmax", "softmax", ["eror"], "unknown metric 'eror': did you mean 'error'"),
        ("dropmax", "softmax", ["nll_scaled"], "share no two seeds"),
    ],
)
def test_mistakes_are_explained(store: Store, a: str, b: str, metrics: list[str], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        compare(store, a, b, metrics)


def test_it_is_printed_and_drawn(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compare(store, "dropmax", "softmax")
    print_comparison("dropmax", "softmax", found)
    said = capsys.readouterr().out
    assert re.search(r"mnist-1k\s+error \(%\)\s+-1\.23 ± 0\.\d\d\s+4 ", said)
    assert "Holm's correction for 6 comparisons" in " ".join(said.split())
    pytest.importorskip("matplotlib")
    style.save(pictures.differences("dropmax", "softmax", found), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_of_a_study_has_tables_points_curves_and_commands_and_loads_nothing(store: Store) -> None:
    pytest.importorskip("matplotlib")
    curve = [{"epoch": epoch, "validation": {"error": 0.1 / epoch, "nll": 1 / epoch}} for epoch in (1, 2, 3)]
    for job in store.plan().groups[0].run_jobs({}, 2):
        store.append(result(job, error=0.04).model_copy(update={"curve": curve}))
    page = make_page(store)
    assert page.count("<table>") == 4
    assert page.count('<img class="chart"') == 4  # three metrics, and the curves of the one data set that has them
    assert "dropmax reproduce &lt;b&gt;" in page
    assert "<b>" not in page
    assert "paper 5.32 ± 0.09" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)
    assert "<script" not in page


def test_the_command_line(store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reproduce(compared=("dropmax", "softmax"), out=store.path, as_json=True)
    found = json.loads(capsys.readouterr().out)["differences"]
    assert len(found) == 6
    assert found[0]["significant"]
    pytest.importorskip("matplotlib")
    report([store.path], out=tmp_path / "page.html")
    assert "The report is in" in capsys.readouterr().out
    assert "MNIST-1K" in (tmp_path / "page.html").read_text()


CURVE = [{"epoch": epoch, "validation": {"error": 0.1 + 1 / epoch, "nll": 1.0}} for epoch in (1, 2, 10)]


def test_curves_are_means_over_the_seeds_with_a_band(store: Store) -> None:
    pytest.importorskip("matplotlib")
    worse = [{**row, "validation": {"error": row["validation"]["error"] + 0.02, "nll": 3.0}} for row in CURVE]  # type: ignore[index]
    for job, curve in zip(store.plan().groups[0].run_jobs({}, 2), (CURVE, worse), strict=True):
        store.append(result(job).model_copy(update={"curve": curve}))
    runs = [run for run in store.runs() if run.data == "mnist-1k"]
    figure = pictures.curves(runs, names={"softmax": "Softmax"})
    error, nll = figure.axes
    assert error.lines[0].get_ydata().tolist() == pytest.approx([111, 61, 21])
    assert nll.lines[0].get_ydata().tolist() == [2, 2, 2]
    low, high = nll.collections[0].get_datalim(nll.transData).intervaly
    assert (low, high) == (1, 3)
    assert error.get_ylim()[1] == pytest.approx(2.5 * 22), "the first epochs do not flatten the rest"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["Softmax"]
    assert pictures.curves([run for run in runs if run.variant == "dropmax"]) is None
    with pytest.raises(InvalidValue, match="unknown variant with a curve 'dropmax'"):
        pictures.curves(runs, names={"dropmax": "DropMax"})


def test_the_critical_difference_diagram_ranks_what_all_data_sets_have(store: Store) -> None:
    pytest.importorskip("matplotlib")
    runs = store.runs()
    more = [run.model_copy(update={"variant": "sparsemax"}) for run in runs if run.variant == "softmax"]
    studies = [[run for run in runs + more if run.data == data] for data in ("mnist-1k", "mnist-5k")]
    names = {"softmax": "softmax", "dropmax": "**DropMax**", "sparsemax": "sparsemax"}
    (axes,) = pictures.ranks(studies, ["error"], names).axes
    words = {text.get_text(): text.get_fontweight() for text in axes.texts}
    assert words["DropMax  1.0"] == "bold"
    assert words["2.5  sparsemax"] == "normal"
    assert "critical difference 2.3, wider than this scale" in words
    with pytest.raises(InvalidValue, match="mnist-1k has no runs of 'focal': rank what all have"):
        pictures.ranks(studies, ["error"], {**names, "focal": "focal loss"})


def test_a_page_of_the_site_has_both_in_its_own_colours() -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("mkdocs")
    specification = importlib.util.spec_from_file_location("hooks", Path(__file__).parents[3] / "docs" / "hooks.py")
    assert specification is not None
    assert specification.loader is not None
    hooks = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(hooks)
    sets = "frozen-features/banking77-10, frozen-features/clinc150-5"
    page = hooks.on_page_markdown(
        f"<!-- ranks: {sets} | error | softmax=softmax, dropmax=**DropMax**, focal=focal\nloss -->\n"
        "<!-- curves: start | error, nll | softmax-released=softmax, dropmax-released=DropMax -->"
    )
    assert page.count("<svg") == page.count("</svg>") == 2
    assert "var(--blue)" in page
    for words in ("Mean ranks of 3 methods on 2 data sets", "Validation curves of 2 methods", "error on held-out rows"):
        assert words in page
