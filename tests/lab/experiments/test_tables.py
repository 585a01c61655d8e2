"""Tables against numbers worked out by other means, and what each format does with awkward text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dropmax.cli.reproduce import reproduce
from dropmax.errors import InvalidValue, RunError
from dropmax.heads import HEADS, Softmax
from dropmax.lab.experiments import Store, holm, make_table, plan_study, plan_table, write_tables
from dropmax.lab.experiments.compare import compare
from dropmax.lab.experiments.paper import COLUMNS, PAPER, ROWS
from dropmax.lab.experiments.records import failure
from dropmax.lab.experiments.render import print_table, to_dict, to_markdown, to_tex
from dropmax.lab.results import load
from tests.lab.experiments.results import begun, fill, result
from tools import docs_tables

ERRORS = {
    ("softmax", "mnist-1k"): [0.0418, 0.0402, 0.0431, 0.0395, 0.0422],
    ("sparsemax", "mnist-1k"): [0.0301, 0.0288, 0.0315, 0.0279, 0.0312],
    ("dropmax-qp", "mnist-1k"): [0.0310, 0.0288, 0.0310, 0.0295, 0.0301],
    ("dropmax", "mnist-1k"): [0.0288, 0.0275, 0.0301, 0.0290, 0.0296],
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    plan = plan_table(["mnist-1k"], heads=["softmax", "sparsemax", "dropmax-qp", "dropmax"], tune=False)
    return fill(tmp_path / "out", plan, ERRORS)


def test_means_intervals_and_corrected_p_values(store: Store) -> None:
    cells = make_table(store).cells
    percent = {head: [100 * value for value in values] for (head, _), values in ERRORS.items()}
    for head, values in percent.items():
        cell = cells[head, "mnist-1k"]
        low, high = stats.t.interval(0.95, 4, loc=sum(values) / 5, scale=stats.sem(values))
        assert cell.mean == pytest.approx(sum(values) / 5)
        assert cell.half_width == pytest.approx((high - low) / 2)
    # By hand: three comparisons with the best (dropmax); the smallest p is tripled, the next doubled, the last kept.
    rivals = ["softmax", "sparsemax", "dropmax-qp"]
    raw = {head: float(stats.ttest_rel(percent[head], percent["dropmax"]).pvalue) for head in rivals}
    order = sorted(rivals, key=raw.__getitem__)
    first = min(1.0, 3 * raw[order[0]])
    second = max(first, min(1.0, 2 * raw[order[1]]))
    third = max(second, raw[order[2]])
    for head, expected in zip(order, (first, second, third), strict=True):
        assert cells[head, "mnist-1k"].p_value == pytest.approx(expected, rel=1e-6)
        assert cells[head, "mnist-1k"].tied == (expected > 0.05)
    assert [head for head in rivals if cells[head, "mnist-1k"].tied] == ["sparsemax", "dropmax-qp"]
    assert raw["dropmax-qp"] < 0.05, "the numbers are chosen so that the correction makes a difference"
    assert [head for head in HEADS if cells[head, "mnist-1k"].best] == ["dropmax"]


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_against_its_definition(p_values: list[float]) -> None:
    ranked = sorted(p_values)
    expected = {}
    for i, p in enumerate(ranked):  # the definition, over all smaller ones
        expected.setdefault(p, max(min(1.0, (len(ranked) - j) * ranked[j]) for j in range(i + 1)))
    # Equal p-values share the largest correction their ranks give, which is that of the first.
    assert holm(p_values) == pytest.approx([expected[p] for p in p_values])


def test_cells_without_numbers_say_why(store: Store) -> None:
    table = make_table(store)
    assert [column.title for column in table.columns] == list(COLUMNS.values())
    assert table.rows == ROWS
    assert table.cells["softmax", "mnist-5k"].note == "not run"
    assert table.cells["random-dropmax", "mnist-1k"].note == "not run"
    assert table.cells["dropmax", "cifar-100"].note == "needs a GPU-week"
    assert table.cells["dropmax", "awa"].note == "images no longer distributed"
    assert table.cells["dropmax", "mnist-1k"].note == ""


def test_runs_that_are_missing_or_failed_are_counted(tmp_path: Path) -> None:
    plan = plan_table(["mnist-1k"], heads=["softmax", "sparsemax", "dropmax"], runs=3, tune=False)
    store = fill(tmp_path / "out", plan, {("softmax", "mnist-1k"): [0.05, 0.06], ("dropmax", "mnist-1k"): [0.04]})
    softmax, sparsemax, dropmax = plan.groups
    for job in (softmax.run_jobs({}, 3)[2], *sparsemax.run_jobs({}, 3)):
        store.append(failure(job, "the loss went away"))
    cells = make_table(store).cells
    assert cells["softmax", "mnist-1k"].note == "2 of 3 runs, 1 failed"
    assert cells["sparsemax", "mnist-1k"].note == "failed: the loss went away"
    assert cells[dropmax.variant, "mnist-1k"].note == "1 of 3 runs"
    # One run has no interval, and nothing can be said about differences.
    assert cells["dropmax", "mnist-1k"].half_width is None
    assert cells["dropmax", "mnist-1k"].best
    assert cells["softmax", "mnist-1k"].p_value is None
    assert not cells["softmax", "mnist-1k"].tied


def test_numbers_on_awa2_stay_out_of_the_awa_column(tmp_path: Path) -> None:
    plan = plan_table(["awa2"], heads=["softmax"], runs=2, tune=False)
    table = make_table(fill(tmp_path / "out", plan, {("softmax", "awa2"): [0.3, 0.4]}))
    assert ("softmax", "awa") not in table.cells, "its column appears where one of the paper's was asked for"
    assert table.cells["softmax", "awa2"].mean == pytest.approx(35)
    assert table.cells["softmax", "awa2"].paper is None
    assert any("not comparable" in note for note in table.notes)


def test_the_papers_numbers() -> None:
    assert list(PAPER) == list(ROWS) == list(HEADS)
    assert PAPER["dropmax"]["mnist-1k"] == (5.32, 0.09)
    assert PAPER["softmax"]["cub"] == (48.84, 0.85)
    assert PAPER["deterministic-dropmax"]["awa"] == (26.22, 0.76)
    # The bold ones of the paper are the lowest of their columns.
    for data in COLUMNS:
        best = min(PAPER, key=lambda head: PAPER[head][data])
        assert best == ("deterministic-dropmax" if data == "awa" else "dropmax")


def test_stamps_are_on_every_table(tmp_path: Path) -> None:
    shorter = {"schedule_scale": 0.1, "train_size": 500, "overrides": {"training.batch_size": 25}}
    plan = plan_table(["mnist-1k"], heads=["softmax"], runs=2, tune=False, **shorter)  # type: ignore[arg-type]
    errors = {("softmax", "mnist-1k"): [0.05, 0.06]}
    store = fill(tmp_path / "out", plan, errors, command="dropmax reproduce mnist-1k")
    written = write_tables(store, formats=["md", "tex"])
    assert written == ["tables.md", "tables.tex", "runs.csv"]
    for name in written[:2]:
        text = (store.path / name).read_text(encoding="utf-8").replace("\\_", "_")
        for stamp in ("released", "schedule x0.1", "500 training examples", "2 runs", "training.batch_size = 25"):
            assert stamp in text, (name, stamp)
        for origin in ("dropmax reproduce mnist-1k", "0123abc", "torch 2.13", "seeds: 0 | 1"):
            assert origin in text, (name, origin)
    before = {name: (store.path / name).read_bytes() for name in written}
    write_tables(store, formats=["md", "tex"])
    assert {name: (store.path / name).read_bytes() for name in written} == before


def test_markdown_marks_the_best_and_the_tied(store: Store) -> None:
    rows = [line.split("|") for line in to_markdown([make_table(store)]).splitlines() if line.startswith("|")]
    lines = {row[1].strip(): row[2].strip() for row in rows}
    assert re.fullmatch(r"\*\*2\.90 ± 0\.\d\d\*\* \[5\.32 ± 0\.09\]", lines["DropMax"])
    assert re.fullmatch(r"2\.99 ± 0\.\d\d† \[6\.57 ± 0\.17\]", lines["Sparsemax"])
    assert re.fullmatch(r"4\.14 ± 0\.\d\d \[7\.09 ± 0\.46\]", lines["Base Softmax"])
    assert lines["Random DropMax"] == "not run [7.19 ± 0.57]"


def test_the_table_on_the_screen_has_the_columns_that_were_run(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    print_table(make_table(store))
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if line.strip().startswith("Base Softmax"))
    assert "4.14 ± 0.18" in row
    assert "7.09 ± 0.46" in row
    assert "MNIST-1K" in text
    assert "MNIST-5K" not in text
    assert text.count("†") >= 2, "two heads are not told from the best, and the note says what the sign means"


def test_the_csv_has_a_row_per_run_and_pandas_reads_it_without_options(store: Store) -> None:
    pandas = pytest.importorskip("pandas")
    write_tables(store)
    frame = pandas.read_csv(store.path / "runs.csv")
    assert len(frame) == 20
    means = frame.groupby("variant")["test.mean.error"].mean()
    assert means["softmax"] == pytest.approx(0.04136)
    assert set(frame["provenance.commit"]) == {"0123abc"}
    loaded = load(store.path)
    assert loaded.drop(columns="study").columns.tolist() == frame.columns.tolist()
    assert loaded["test.mean.error"].tolist() == frame["test.mean.error"].tolist()
    assert load(store.path.parent)["study"].unique().tolist() == ["out"]
    with pytest.raises(RunError, match=r"there is no results\.jsonl in"):
        load(store.path / "nowhere")


def test_nll_is_in_nats_and_has_no_number_of_the_papers(store: Store) -> None:
    table = make_table(store, "nll")
    assert table.cells["softmax", "mnist-1k"].mean == pytest.approx(0.4136)
    assert all(cell.paper is None for cell in table.cells.values())
    assert all(math.isfinite(row["mean"]) for row in to_dict(table)["cells"] if row["runs"])


def test_awkward_text_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script> & 50% | $x_1$"
    plan = plan_table(["mnist-1k"], heads=["softmax", "dropmax"], runs=1, tune=False)
    store = fill(tmp_path / "out", plan, {("dropmax", "mnist-1k"): [0.05]}, command=f"dropmax {evil}")
    job = plan.groups[0].run_jobs({}, 1)[0]
    store.append(failure(job, evil))
    table = make_table(store)

    tex = next(line for line in to_tex([table]).splitlines() if line.startswith("Base Softmax"))
    assert r"\& 50\% | \$x\_1\$" in tex
    assert tex.replace(r"\&", "").count("&") == 7  # the separators and no other

    row = next(line for line in to_markdown([table]).splitlines() if line.startswith("| Base Softmax"))
    assert "<script" not in row
    assert len(re.findall(r"(?<!\\)\|", row)) == 9


def test_a_registered_head_keeps_its_row_and_a_study_has_rows_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(HEADS, "focal", Softmax)
    plan = plan_table(["mnist-1k"], heads=["focal"], runs=2, tune=False)
    table = make_table(fill(tmp_path / "out", plan, {("focal", "mnist-1k"): [0.05, 0.06]}))
    assert list(table.rows) == [*ROWS, "focal"]
    assert table.cells["focal", "mnist-1k"].mean == pytest.approx(5.5)
    assert table.cells["focal", "mnist-1k"].paper is None

    path = tmp_path / "s.toml"
    path.write_text('[base]\ndata = "mnist-1k"\n[variants.dropmax]\n[variants.no-kl]\n"head.kl_weight" = 0\n')
    table = make_table(fill(tmp_path / "study", plan_study(path, runs=2), {("no-kl", "mnist-1k"): [0.05, 0.06]}))
    assert list(table.rows) == ["dropmax", "no-kl"]
    assert [column.data for column in table.columns] == ["mnist-1k"]
    assert table.cells["dropmax", "mnist-1k"].paper is None
    assert table.cells["dropmax", "mnist-1k"].note == "not run yet"


def test_the_papers_numbers_stand_beside_the_papers_data_only(tmp_path: Path) -> None:
    for index, options in enumerate(
        ({"train_size": 500}, {"overrides": {"data.train_size": 500}}, {"overrides": {"data.name": "cifar-100-5k"}})
    ):
        plan = plan_table(["mnist-1k"], heads=["softmax"], runs=1, tune=False, **options)  # type: ignore[arg-type]
        key = ("softmax", plan.groups[0].data)
        cell = make_table(fill(tmp_path / str(index), plan, {key: [0.05]})).cells[key]
        assert cell.mean == pytest.approx(5.0)
        assert cell.paper is None


@pytest.fixture
def tuned(tmp_path: Path) -> Store:
    """A tuned study: softmax and dropmax, the latter measured with the exact sum too, and two winners of grids."""
    path = tmp_path / "s.toml"
    path.write_text(
        '[base]\ndata = "mnist-1k"\n[variants.softmax]\n"head.name" = "softmax"\n'
        'grid."training.weight_decay" = [0.0, 1e-4, 1e-3]\n'
        '[variants."dropmax-0.1"]\ngrid."training.weight_decay" = [1e-5, 1e-4]\n'
        'grid."training.learning_rate" = [1e-4, 1e-3, 1e-2]\n'
    )
    plan = plan_study(path, runs=2)
    store = begun(tmp_path / "results" / "study", plan)
    winners = plan.groups[0].points[0], plan.groups[1].points[4]
    for group, point, error in zip(plan.groups, winners, (4, 2), strict=True):
        for job in group.run_jobs(point, 2):
            exact = group.variant != "softmax"
            store.append(result(job, error=(error + job.seed) / 100, exact=exact, nll_scaled=error, aurc_scaled=0.01))
    return store


def test_a_further_mode_has_rows_where_it_was_measured(tuned: Store, capsys: pytest.CaptureFixture[str]) -> None:
    table = make_table(tuned, modes=("mean", "exact"))
    assert table.rows == {"softmax": "softmax", "dropmax-0.1": "dropmax-0.1", "dropmax-0.1@exact": "dropmax-0.1, exact"}
    assert table.cells["dropmax-0.1", "mnist-1k"].mean == pytest.approx(2.5)
    assert table.cells["dropmax-0.1@exact", "mnist-1k"].mean == pytest.approx(1.25)
    assert table.cells["dropmax-0.1@exact", "mnist-1k"].best
    assert make_table(tuned, "nll_scaled", modes=("exact",)).cells["dropmax-0.1", "mnist-1k"].mean == pytest.approx(1)
    assert compare(tuned, "dropmax-0.1@exact", "dropmax-0.1", ["error"])[0].mean == pytest.approx(-1.25)
    with pytest.raises(InvalidValue, match="unknown mode of softmax 'exact'"):
        compare(tuned, "dropmax-0.1", "softmax@exact")
    with pytest.raises(InvalidValue, match="unknown mode 'exakt': did you mean 'exact'"):
        make_table(tuned, modes=("mean", "exakt"))
    reproduce(only_tables=True, out=tuned.path, metrics="error,aurc_scaled", table_modes="mean,exact")
    assert "dropmax-0.1, exact" in capsys.readouterr().out
    # Metrics of one data set stand side by side.
    assert (tuned.path / "tables.md").read_text(encoding="utf-8").splitlines()[:7] == [
        "# Study: MNIST-1K (released), mode mean unless a row names another",
        "",
        "| | test error % | AURC %, scaled |",
        "|---|---|---|",
        "| softmax | 4.50 ± 6.35† | 1.000 ± 0.000 |",
        "| dropmax-0.1 | 2.50 ± 6.35† | 1.000 ± 0.000 |",
        "| dropmax-0.1, exact | **1.25 ± 3.18** | **0.500 ± 0.000** |",
    ]


def test_winners_on_an_edge_are_named_under_the_table(tuned: Store) -> None:
    note = next(note for note in make_table(tuned).notes if "edge" in note)
    # softmax won with a weight decay of 0, below which there is nothing; dropmax inside its learning rates.
    assert note == "Winners on an edge of their grid: dropmax-0.1 on mnist-1k (weight decay 0.0001, the highest)."


@pytest.fixture
def pages(tuned: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(docs_tables, "ROOT", tuned.path.parents[1])
    for cached in (docs_tables.records, docs_tables._edges):
        cached.cache_clear()
    yield
    for cached in (docs_tables.records, docs_tables._edges):
        cached.cache_clear()


@pytest.mark.usefixtures("pages")
def test_a_table_of_a_page_has_modes_differences_and_edges() -> None:
    rows = "softmax=softmax, dropmax-0.1=DropMax (q = p), dropmax-0.1@exact=DropMax, exact sum"
    columns = "error, nll_scaled, dropmax-0.1@exact-error, softmax-nll_scaled"
    table = docs_tables.table(f"study | {columns} | {rows}").splitlines()
    assert table[0] == (
        "| | test error % | NLL, scaled | dropmax-0.1@exact less this: test error % | softmax less this: NLL, scaled |"
    )
    edge = "weight decay 0.0001, the highest"
    assert table[2:] == [
        "| softmax | 4.50 ± 6.35 | 4.000 ± 0.000 | **-3.25 ± 3.18** |  |",
        "| DropMax (q = p) | 2.50 ± 6.35 | 2.000 ± 0.000 | -1.25 ± 3.18 | **+2.000 ± 0.000** |",
        "| DropMax, exact sum | **1.25 ± 3.18** | **1.000 ± 0.000** |  | **+3.000 ± 0.000** |",
    ]
    page = docs_tables.render("<!-- edges: study -->\n<!-- end -->")
    assert page.splitlines()[1] == f"1 of 2 winners of tuning on an edge of its grid: {edge} (dropmax-0.1)."
    assert docs_tables.render(page) == page


@pytest.mark.usefixtures("pages")
@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("study | error | softmax@exact=x", "softmax was not measured in 'error' of mode 'exact'"),
        ("study | eror | softmax=x", "'eror' is no column"),
        ("study | error, | softmax=x", "'' is no column"),
        ("study | error | sofmax=x", "no runs of 'sofmax'"),
        ("nowhere | error | softmax=x", "there is no results/nowhere"),
    ],
)
def test_a_table_that_cannot_be_made_says_why(table: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        docs_tables.table(table)
