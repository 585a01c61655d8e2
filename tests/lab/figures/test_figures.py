"""Which figures are made of which runs, what they say about themselves, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from dropmax import PAPER_OBJECTIVE
from dropmax.errors import DropMaxError, InvalidValue, RunError
from dropmax.lab.figures import contours
from dropmax.lab.figures.registry import FIGURES, Made, Needs, make_figures
from dropmax.lab.figures.runs import Subject, _label, load_runs
from dropmax.workbench.recipes import load_recipe
from tests.lab.figures.small import make_run, write_data

pytest.importorskip("matplotlib", reason="needs matplotlib (the extra `figures`)")

EVERY = {
    "architecture", "concept-spots", "convergence",
    "retain-profiles-spots", "examples-spots", "contours", "noise-spots",
    "gradient-norms-spots", "condition-1-spots", "reliability-spots", "rejection-spots", "confusion-graph-spots",
    "mask-curves-spots",
}  # fmt: skip


@pytest.fixture(scope="module")
def everything(image_runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Made]]:
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contours, "_STEPS", 20)
        made = make_figures(load_runs(image_runs), out, formats=["png"], recorded=True, command="dropmax figures & co")
    return out, made


def test_two_heads_on_pictures_give_every_figure(everything: tuple[Path, list[Made]]) -> None:
    out, made = everything
    assert {one.name for one in made} == EVERY
    assert not any(one.why_not for one in made)
    files = {path.name for path in out.iterdir() if path.is_file()}
    assert files == {f"{name}.png" for name in EVERY} | {"captions.md"}
    for name in EVERY:
        with Image.open(out / f"{name}.png") as image:
            assert image.width >= 600  # a column's width at 200 dots an inch
            colours = image.convert("RGB").resize((60, 60)).getcolors(3600)
            assert colours is not None
            assert len(colours) > 5, f"{name} is blank"


def test_figures_tell_what_they_are_and_who_made_them(everything: tuple[Path, list[Made]]) -> None:
    out, made = everything
    for one in made:
        with Image.open(out / f"{one.name}.png") as image:
            text = image.info
        assert text["Comment"] == "dropmax figures & co"
        assert text["Description"] == one.caption
    captions = (out / "captions.md").read_text()
    assert captions.count("- command: `dropmax figures & co`") == len(EVERY)
    assert [line for line in captions.splitlines() if line.startswith("## ")] == [f"## {one.name}" for one in made]
    assert "<script>" not in captions


def test_vector_files_tell_it_too_and_come_out_the_same_each_time(image_runs: list[Path], tmp_path: Path) -> None:
    runs = load_runs(image_runs[1:2])
    for directory in ("a", "b"):
        out = tmp_path / directory
        make_figures(runs, out, only=["confusion-graph"], formats=["svg", "pdf"], command="a & b")
    svg, pdf = (tmp_path / "a" / f"confusion-graph-spots.{form}" for form in ("svg", "pdf"))
    assert "a &amp; b" in svg.read_text()
    assert "<script" not in svg.read_text()
    assert b"a & b" in pdf.read_bytes()
    for path in (svg, pdf):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_captions_have_measured_numbers(everything: tuple[Path, list[Made]]) -> None:
    captions = {one.name: one.caption for one in everything[1]}
    assert "4 of 4 repetitions ended with exactly the run's weights" in captions["convergence"]
    assert "bands go from the lowest to the highest" in captions["convergence"]
    assert "times as large" in captions["gradient-norms-spots"]
    assert "the inequality holds on" in captions["condition-1-spots"]


def test_a_recording_is_made_once_and_read_again(
    everything: tuple[Path, list[Made]], image_runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr("dropmax.lab.figures.recording.fit", refuse)
    out, _ = everything
    runs = load_runs(image_runs)
    made = make_figures(runs, out, only=["convergence"], formats=["png"], recorded=True, force=True, command="c")
    assert "The batch's loss at each step" in made[0].caption
    # Captions of the other figures stay.
    assert len((out / "captions.md").read_text().split("\n## ")) == len(EVERY) + 1
    path = next((out / "recordings").iterdir())
    kept = path.read_text()
    try:
        path.write_text("{")
        with pytest.raises(RunError, match=r"the recording .* is damaged .*: delete it and record again with --record"):
            make_figures(runs, out, only=["convergence"], force=True)
    finally:
        path.write_text(kept)
    assert json.loads(kept)["provenance"]["command"] == "dropmax figures & co"


def test_what_a_single_run_on_features_allows(
    feature_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contours, "_STEPS", 20)
    made = make_figures(load_runs([feature_run]), tmp_path, formats=["svg"])
    files = {one.name for one in made if one.files}
    assert files == {
        "architecture", "convergence", "contours", "condition-1-numbers", "reliability-numbers", "rejection-numbers",
        "confusion-graph-numbers", "mask-curves-numbers",
    }  # fmt: skip
    reasons = {one.name: one.why_not for one in made if not one.files}
    softmax = "needs a softmax run on the same data: dropmax train numbers.npz --head softmax"
    assert reasons["retain-profiles"].startswith(softmax)
    assert reasons["gradient-norms"].startswith(softmax)
    assert reasons["noise"] == "needs images, and numbers.npz has features"
    convergence = next(one for one in made if one.name == "convergence")
    assert "From the runs' logs" in convergence.caption
    assert "One seed: no band" in convergence.caption


@pytest.mark.parametrize(
    ("only", "chosen", "message"),
    [
        (["noise"], slice(0, 0), "the figure noise needs a dropmax run on images, and no run was given"),
        (
            ["confusion-graph"],
            slice(0, 1),
            "needs a run whose head learns masks: dropmax train spots.npz --head dropmax",
        ),
        (["examples"], slice(1, 2), "needs a softmax run on the same data: dropmax train spots.npz --head softmax"),
        (["gradient-norms"], slice(0, 2), "needs what happened at each step, .*: --record trains it again"),
    ],
)
def test_only_makes_what_is_missing_an_error(
    image_runs: list[Path], tmp_path: Path, only: list[str], chosen: slice, message: str
) -> None:
    with pytest.raises(RunError, match=message):
        make_figures(load_runs(image_runs[chosen]), tmp_path / "out", only=only)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ["convergance"]}, "unknown figure 'convergance': did you mean 'convergence'"),
        ({"formats": ["jpg"]}, "unknown format 'jpg'"),
        ({"formats": []}, "name at least one format of png, svg, pdf"),
        (
            {"only": ["contours"], "recorded": True},
            "--record is for convergence, gradient-norms: leave it out for cont",
        ),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, list[str]], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        make_figures([], tmp_path, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("architecture.svg", r"architecture.svg would be overwritten: use --force"),
        ("captions.md", r"captions.md is not ours"),
    ],
)
def test_nothing_is_overwritten_without_force(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(RunError, match=message):
        make_figures([], tmp_path, only=["architecture"])
    assert (tmp_path / name).read_text() == "mine"
    make_figures([], tmp_path, only=["architecture"], force=True)
    assert (tmp_path / name).read_text() != "mine"


def test_a_perfect_base_model_leaves_nothing_hard(
    image_runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dropmax.lab.figures.profiles.hardest", lambda base, limit: [])
    message = r"retain-profiles-spots needs test examples that softmax gets wrong, and .* right"
    with pytest.raises(RunError, match=message):
        make_figures(load_runs(image_runs[:2]), tmp_path, only=["retain-profiles"], formats=["png"])


def test_too_many_classes_for_a_figure(image_runs: list[Path]) -> None:
    run = load_runs(image_runs[1:2])
    reason = Needs(masks=True, classes=(2, 5)).missing(Subject(run))
    assert reason == "needs data of 2 to 5 classes, such as MNIST, and spots.npz has 7"


def test_runs_that_cannot_be_drawn(image_runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is given twice"):
        load_runs([image_runs[0], image_runs[0]])
    with pytest.raises(RunError, match="there is no directory"):
        load_runs([tmp_path / "nowhere"])
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "recipe.toml").write_text((image_runs[0] / "recipe.toml").read_text())
    with pytest.raises(RunError, match=r"has not ended: resume it with `dropmax train --resume"):
        load_runs([begun])


def test_data_that_changed_is_noticed(tmp_path: Path) -> None:
    data = write_data(tmp_path / "d.npz", ["a", "b", "c"], images=False)
    run = make_run(tmp_path / "run", data, "softmax", epochs=1)
    write_data(data, ["a", "b"], images=False)
    (loaded,) = load_runs([run])
    with pytest.raises(DropMaxError, match=r"d.npz has changed since .* was trained: it had 3 classes"):
        loaded.outputs  # noqa: B018


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(DropMaxError, match=r'pip install "dropmax\[figures\]"'):
        make_figures([], tmp_path)


def test_every_figure_says_what_it_needs() -> None:
    assert all(figure.needs.words() and len(figure.caption) > 50 for figure in FIGURES.values())


def test_the_printed_objective_is_named_and_not_spelled_out() -> None:
    default = load_recipe("cifar-100-5k", "small")
    printed = default.override({f"head.{name}": value for name, value in PAPER_OBJECTIVE.items()})
    assert _label(printed, [default]) == "dropmax (as printed)"
    assert _label(default, [printed]) == "dropmax"
    half = default.override({"head.mask_gradient": True})
    assert _label(half, [default]) == "dropmax (mask_gradient=True)"


def test_a_subject_without_runs_says_what_it_lacks() -> None:
    nothing = Subject([])
    assert nothing.recorded_pair() == []
    with pytest.raises(RunError, match="learns masks"):
        nothing.with_masks()
    with pytest.raises(RunError, match="the head softmax"):
        nothing.pair()
