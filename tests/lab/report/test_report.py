"""The report: self-contained, harmless whatever a class is called, and right in its numbers."""

from __future__ import annotations

import base64
import io
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dropmax import metrics
from dropmax.errors import InvalidValue
from dropmax.lab.figures.runs import load_runs, picture
from dropmax.lab.report import make_report
from dropmax.lab.report.compare import compare
from dropmax.lab.report.page import _portable, environment
from dropmax.lab.report.sections import classes_section, disagreements, hardest
from dropmax.lab.statistics import paired_difference, t_interval
from tests.lab.figures.small import HOSTILE, make_run, write_data

VOID = {"meta", "img", "br", "line", "path", "rect", "circle", "polyline"}


class Page(HTMLParser):
    """Reads a page, and fails where a tag is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data + " "


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Runs on tiny pictures and on features of two and of two hundred classes."""
    place = tmp_path_factory.mktemp("report")
    spots = write_data(place / "spots.npz", ["zero", HOSTILE, "two", "three"])
    pair = write_data(place / "pair.npz", ["yes", "no"], images=False, each=30)
    many = write_data(place / "many.npz", [f"class number {k}" for k in range(200)], images=False, each=5)
    return {
        "images": [
            make_run(place / f"{head}-{seed}", spots, head, seed=seed)
            for head in ("softmax", "dropmax", "sparsemax")
            for seed in (0, 1)
        ],
        "pair": [make_run(place / "pair", pair, "dropmax")],
        "many": [make_run(place / "many", many, "dropmax", epochs=2)],
    }


@pytest.fixture(scope="module")
def pages(runs: dict[str, list[Path]]) -> dict[str, str]:
    found = {kind: make_report(load_runs(paths), "dropmax report it") for kind, paths in runs.items()}
    found["one"] = make_report(load_runs(runs["images"][2:3]), "dropmax report it")
    found["softmax"] = make_report(load_runs(runs["images"][:1]), "dropmax report it")
    return found


def test_nothing_is_fetched_and_nothing_is_executed(pages: dict[str, str]) -> None:
    for text in pages.values():
        page = Page(text)
        for tag, attributes in page.tags:
            assert tag not in ("script", "link", "iframe", "object", "embed", "form", "base", "a")
            assert not any(key.startswith("on") or key in ("xlink:href", "srcset") for key in attributes)
            assert (attributes.get("href") or "#").startswith(("#", "data:image/png;base64,"))
            assert (attributes.get("src") or "data:image/png;base64,").startswith("data:image/png;base64,")
        assert "url(" not in text.replace("url(#", "")
        assert "@import" not in text
        assert "http://" not in text.replace("http-equiv", "")
        assert "https://" not in text
        policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
        assert policy == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@pytest.mark.parametrize(
    ("kind", "shown", "absent"),
    [
        ("images", '<script>alert("x")</script>', "<script"),  # a hostile class name is only text
        ("pair", "a row of 5 features", "<img"),
        ("many", "160 classes with fewer errors are left out", 'class="matrix"'),
        ("softmax", "The numbers", "ver all masks"),
        ("one", "One run: no interval.", "read such a difference as an anecdote"),
    ],
)
def test_what_a_page_shows_and_what_it_leaves_out(pages: dict[str, str], kind: str, shown: str, absent: str) -> None:
    assert shown in Page(pages[kind]).text
    assert absent not in pages[kind]


def test_it_has_every_section(pages: dict[str, str]) -> None:
    for text in pages.values():
        shown = Page(text).text
        for title in (
            "What was trained on what",
            "The numbers",
            "How it learned",
            "Whether its confidence can be believed",
            "What is confused with what",
            "Class by class",
            "hardest examples",
            "How to repeat it",
            "dropmax report it",
            "Squared distance of the predicted probabilities",
            "learning_rate = 0.01",
        ):
            assert title in shown


def test_pictures_are_those_of_the_hardest_examples(runs: dict[str, list[Path]], pages: dict[str, str]) -> None:
    (run,) = load_runs(runs["images"][2:3])
    chosen = hardest(run)
    on_truth = run.outputs.probs[torch.arange(len(run.test)), run.outputs.labels]
    assert [float(p) for p in on_truth[chosen]] == sorted(on_truth.tolist())[:20]
    cards = pages["one"].partition('<div class="cards">')[2]
    found = re.findall(r'src="data:image/png;base64,([^"]+)"', cards)
    assert len(found) == len(chosen)
    for data, index in zip(found, chosen, strict=True):
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert np.array_equal(np.asarray(image), picture(run.test, index))


def test_two_hundred_classes_stay_legible(pages: dict[str, str]) -> None:
    """No more than the strongest links and the classes that matter are shown, so the page stays small."""
    text = pages["many"]
    assert len(text) < 600_000
    for profile in re.findall(r'<table class="profile">.*?</table>', text, re.DOTALL):
        assert profile.count("<tr>") <= 8


def test_a_single_run_has_no_interval(pages: dict[str, str]) -> None:
    assert "±" not in Page(pages["one"]).text.split("What is confused with what")[0]


def test_numbers_are_the_metrics_and_intervals_students(runs: dict[str, list[Path]], pages: dict[str, str]) -> None:
    loaded = load_runs(runs["images"])
    errors = {(run.head.name, run.seed): metrics.error(run.outputs.probs, run.outputs.labels) for run in loaded}
    shown = Page(pages["images"]).text
    for head in ("softmax", "dropmax", "sparsemax"):
        mean, half = t_interval([errors[head, 0], errors[head, 1]])
        assert f"{100 * mean:.2f} ± {100 * half:.2f} %" in shown
    found = compare(loaded)
    assert found.baseline == "softmax"
    expected = paired_difference(*([errors[head, seed] for seed in (0, 1)] for head in ("dropmax", "softmax")))
    difference = found.differences["dropmax", "error"]
    assert difference.paired == expected
    assert difference.p_value is not None
    assert difference.p_value >= expected.p_value  # corrected for two methods compared
    best = min(found.methods, key=lambda m: found.cells[m, "error"].mean or 0)
    assert [m for m in found.methods if found.cells[m, "error"].best] == [best]


def test_seeds_that_do_not_pair_have_no_interval(runs: dict[str, list[Path]]) -> None:
    softmax_0, dropmax_1 = runs["images"][0], runs["images"][3]
    shown = Page(make_report(load_runs([softmax_0, dropmax_1]), "c")).text
    assert "read such a difference as an anecdote" in shown
    assert "No interval for softmax, dropmax: one run." in shown


def test_the_same_method_and_seed_twice_counts_once(runs: dict[str, list[Path]], tmp_path: Path) -> None:
    copy = shutil.copytree(runs["images"][0], tmp_path / "copy")
    found = compare(load_runs([runs["images"][0], copy]))
    assert list(found.cells["softmax", "error"].values) == [0]
    assert found.notes == (f"{copy} has the method and seed of another run, and is left out of the means.",)


def test_runs_on_several_data_sets_are_kept_apart(runs: dict[str, list[Path]]) -> None:
    text = make_report(load_runs([runs["images"][2], runs["pair"][0]]), "c")
    assert re.findall(r'<h1><bdi class="name">(.*?)</bdi></h1>', text) == ["spots.npz", "pair.npz"]
    assert text.count("<h2>The numbers</h2>") == 2


def test_no_run_is_refused() -> None:
    with pytest.raises(InvalidValue, match="name at least one run"):
        make_report([], "c")


@given(st.text())
def test_escaped_text_reads_back_as_text(text: str) -> None:
    class Reader(HTMLParser):
        found = ""

        def handle_data(self, data: str) -> None:
            self.found += data

        def handle_starttag(self, tag: str, attrs: object) -> None:
            raise AssertionError(tag)

    reader = Reader()
    reader.feed(environment().from_string("{{ text }}").render(text=text))
    reader.close()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", reader.found)
    assert [c for c in reader.found if c.isprintable()] == [c for c in text if c.isprintable()]


def test_no_absolute_path_is_shown(runs: dict[str, list[Path]], pages: dict[str, str]) -> None:
    place = str(runs["images"][0].parent)
    assert all(place not in text for text in pages.values())
    assert _portable(f"train {place}/spots.npz --out 'a/b'") == "train …/spots.npz --out 'a/b'"
    assert _portable("1 / 2 and a/b and https") == "1 / 2 and a/b and https"


def test_class_rows_are_those_of_a_plain_count(runs: dict[str, list[Path]]) -> None:
    (run,) = load_runs(runs["images"][2:3])
    truth, said = run.outputs.labels.tolist(), run.outputs.predicted.tolist()
    found = classes_section(run)
    for row in found["rows"]:
        k = run.classes.index(row["name"])
        hits = sum(t == s == k for t, s in zip(truth, said, strict=True))
        assert row["examples"] == truth.count(k)
        assert row["recall"] == pytest.approx(hits / truth.count(k))
        assert row["error"] == pytest.approx(1 - row["recall"])
        assert row["precision"] == (pytest.approx(hits / said.count(k)) if said.count(k) else None)
    assert sum(sum(row) for row in found["counts"]) == len(truth)
    wrong = sum(t != s for t, s in zip(truth, said, strict=True))
    assert sum(pair["mistakes"] for pair in found["pairs"]) == wrong  # four classes have six pairs: all are shown


def test_two_runs_are_compared_example_by_example(runs: dict[str, list[Path]]) -> None:
    second, first = load_runs([runs["images"][2], runs["images"][0]])
    found = disagreements([second, first])
    assert found is not None
    assert (found["first"], found["second"]) == ("softmax", "dropmax")  # softmax comes first however they are given
    wrong = [run.outputs.predicted != run.outputs.labels for run in (first, second)]
    counts = [int((wrong[0] & ~wrong[1]).sum()), int((wrong[1] & ~wrong[0]).sum()), int((wrong[0] & wrong[1]).sum())]
    assert [row["count"] for row in found["rows"]] == counts
    assert disagreements([first]) is None
    shown = Page(make_report([second, first], "c")).text
    assert "Where the two runs disagree" in shown
    assert shown.index("The numbers") < shown.index("What was trained on what")
    assert "exact sum over all masks" in shown
