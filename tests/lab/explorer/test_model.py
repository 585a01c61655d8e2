"""What the explorer knows, against enumeration of all masks and plain loops."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dropmax import HEADS
from dropmax.errors import DataError, RunError
from dropmax.lab.explorer import Explorer
from dropmax.lab.explorer.model import NOISE_LEVELS, PAGE, shown_name
from dropmax.workbench.data import Split
from tests import enumeration as naive
from tests.lab.explorer.small import make_explorer


def everything(explorer: Explorer, **filters: object) -> list[dict[str, object]]:
    first = explorer.examples(**filters)  # type: ignore[arg-type]
    rows = []
    for page in range(1, first["pages"] + 1):
        rows += explorer.examples(**filters, page=page)["examples"]  # type: ignore[arg-type]
    assert len(rows) == first["total"]
    return rows


def logits(explorer: Explorer, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Class logits and rho of one raw input, in float64."""
    head = explorer.trained.model.head
    with torch.no_grad():
        features = explorer.trained.model.net(explorer.trained.prepare(inputs[None]))
        return head.classifier(features)[0].double(), head.retain_probs(features)[0].double()


# --- one answer ------------------------------------------------------------------------------------------------------


def test_an_answer_is_that_of_every_command_with_the_deviation_over_all_masks(explorer: Explorer) -> None:
    inputs = explorer.test.inputs[7]
    o, rho = logits(explorer, inputs)
    masks = naive.all_masks(10)
    weight, p = naive.mask_probabilities(masks, rho), naive.likelihoods(o, masks)
    mean = weight @ p
    std = (weight @ (p - mean).square()).sqrt()
    mean = (o + rho.log()).softmax(-1)  # this model has not been calibrated
    answer = explorer.answer(inputs)
    assert [row["class"] for row in answer["rows"]] == list(range(10))
    np.testing.assert_allclose([row["p"] for row in answer["rows"]], mean, atol=2e-6)
    np.testing.assert_allclose([row["rho"] for row in answer["rows"]], rho, atol=2e-6)
    best = int(mean.argmax())
    assert answer["predicted"] == best
    assert answer["probability"] == answer["rows"][best]["p"]
    assert answer["entropy"] == pytest.approx(-float((mean * mean.log()).sum()) / math.log(10), abs=1e-5)
    assert answer["std"] == pytest.approx(float(std[best]), abs=2e-5)
    ordered = sorted(range(10), key=lambda k: -float(mean[k]))
    assert [member["class"] for member in answer["set"]] == ordered[: len(answer["set"])]
    assert answer["state"] == ("sure" if len(answer["set"]) == 1 else "torn")


def test_sampled_masks_follow_their_seed_and_rho(explorer: Explorer) -> None:
    inputs = explorer.test.inputs[0]
    assert explorer.answer(inputs, seed=4) == explorer.answer(inputs, seed=4)
    assert explorer.answer(inputs, seed=4)["rows"] != explorer.answer(inputs, seed=5)["rows"]
    o, rho = logits(explorer, inputs)
    kept = np.array([[row["kept"] for row in explorer.answer(inputs, seed=s)["rows"]] for s in range(80)])
    assert kept.shape == (80, 10, 8)
    # 640 masks: five standard errors.
    assert np.abs(kept.mean((0, 2)) - rho.numpy()).max() < 5 * 0.5 / math.sqrt(640)
    for s in range(8):
        answer = explorer.answer(inputs, seed=s)
        for number, mask in enumerate(answer["masks"]):
            z = torch.tensor([float(row["kept"][number]) for row in answer["rows"]])
            assert mask["count"] == int(z.sum())
            p = naive.likelihoods(o, z[None])[0]
            assert mask["class"] == int(p.argmax())
            assert mask["p"] == pytest.approx(float(p.max()), abs=2e-5)


@pytest.mark.parametrize("head", HEADS)
def test_every_head_can_be_explored(head: str) -> None:
    explorer = make_explorer(head=head, examples=20)
    answer = explorer.example(3)
    kind = explorer.about()["masks"]
    assert kind == {
        "dropmax": "random",
        "dropmax-qp": "random",
        "deterministic-attention": "gate",
        "deterministic-dropmax": "gate",
        "random-dropmax": "training",
    }.get(head, "none")
    assert bool(answer["masks"]) == (kind == "random")
    assert sum(row["p"] for row in answer["rows"]) == pytest.approx(1, abs=1e-4)
    if kind == "none":
        assert {row["rho"] for row in answer["rows"]} == {1.0}
        assert answer["std"] == 0.0
    json.dumps([explorer.about(), answer, explorer.noise(3), explorer.map(), explorer.examples()], allow_nan=False)


def test_of_many_classes_those_that_matter_are_shown() -> None:
    explorer = make_explorer(classes=tuple(f"kind {k}" for k in range(120)), shape=(3, 32, 32))
    answer = explorer.example(5)
    rows = answer["rows"]
    assert 12 <= len(rows) <= 18
    shown = [row["class"] for row in rows]
    assert answer["predicted"] == shown[0]
    assert answer["true"] in shown
    assert {member["class"] for member in answer["set"]} <= set(shown)
    assert [row["p"] for row in rows] == sorted((row["p"] for row in rows), reverse=True)


# --- examples --------------------------------------------------------------------------------------------------------


@given(
    st.none() | st.integers(0, 9),
    st.none() | st.integers(0, 9),
    st.sampled_from(["hardest", "easiest", "attention"]),
    st.integers(0, 9),
)
def test_lists_are_filtered_and_sorted(
    explorer: Explorer, true: int | None, predicted: int | None, order: str, rival: int
) -> None:
    rows = everything(explorer, true=true, predicted=predicted, order=order, rival=rival)
    answers = [explorer.answer(inputs) for inputs in explorer.test.inputs[: 3 if len(rows) > 3 else 0]]
    for index, answer in enumerate(answers):
        wanted = (true in (None, index % 10)) and (predicted in (None, answer["predicted"]))
        assert wanted == (index in [row["index"] for row in rows])
    assert all(true in (None, row["true"]) and predicted in (None, row["predicted"]) for row in rows)
    keys = [row["attention"] if order == "attention" else row["truth"] for row in rows]
    assert keys == sorted(keys, reverse=order != "hardest")  # type: ignore[type-var]


def test_the_pages_hold_every_example_once(explorer: Explorer) -> None:
    assert sorted(row["index"] for row in everything(explorer)) == list(range(120))  # type: ignore[type-var]
    assert len(explorer.examples(page=1)["examples"]) == PAGE
    assert explorer.examples(page=10**9) == explorer.examples(page=3)


def test_an_example_agrees_with_its_place_in_the_list(explorer: Explorer) -> None:
    for row in everything(explorer)[::17]:
        example = explorer.example(row["index"])  # type: ignore[arg-type]
        assert (example["true"], example["predicted"]) == (row["true"], row["predicted"])
        assert example["rows"][row["true"]]["p"] == pytest.approx(row["truth"], abs=1e-4)
        assert example["image"] == row["image"]


def test_cropped_images_are_shown_as_the_network_sees_them() -> None:
    explorer = make_explorer(classes=("a", "b"), shape=(3, 32, 32), stored=36, examples=9)
    seen = explorer.test.inputs[4][:, 2:34, 2:34]
    alone = explorer.answer(seen)
    assert explorer.example(4) == {"index": 4, "true": 0, "noise": 0.0, **alone}


# --- noise -----------------------------------------------------------------------------------------------------------


def test_the_curve_of_noise_is_what_the_slider_shows(explorer: Explorer) -> None:
    curve = explorer.noise(9, seed=2)
    assert curve["levels"] == list(NOISE_LEVELS)
    assert curve["answer"] == explorer.example(9)["predicted"]
    for place in (0, 4, 20):
        example = explorer.example(9, noise=NOISE_LEVELS[place], seed=2)
        row = example["rows"][curve["answer"]]
        assert curve["probability"][place] == pytest.approx(row["p"], abs=1e-5)
        assert curve["entropy"][place] == pytest.approx(example["entropy"], abs=1e-5)
    assert explorer.example(9, noise=0.5)["image"] != explorer.example(9)["image"]


def test_noise_has_the_strength_it_says() -> None:
    explorer = make_explorer(examples=3)
    grey = torch.full((1, 28, 28), 128, dtype=torch.uint8)
    noisy = explorer._noisy(grey, [0.0, 0.1], 0)
    assert torch.equal(noisy[0], grey)
    assert float((noisy[1].float() - 128).std()) == pytest.approx(25.5, rel=0.1)
    features = make_explorer(shape=(500,), examples=3)
    assert float(features._noisy(torch.zeros(500), [0.5], 0).std()) == pytest.approx(0.5 * 0.4, rel=0.2)


# --- map -------------------------------------------------------------------------------------------------------------


def test_the_map_is_the_mean_of_rho_beside_the_answers(explorer: Explorer) -> None:
    found = explorer.map()
    answers = [explorer.answer(inputs) for inputs in explorer.test.inputs]
    for t in range(10):
        mine = [answer for i, answer in enumerate(answers) if i % 10 == t]
        for k in range(10):
            mean = sum(answer["rows"][k]["rho"] for answer in mine) / len(mine)
            assert found["rho"][t][k] == pytest.approx(mean, abs=1e-3)  # kept in half precision
            assert found["counts"][t][k] == sum(answer["predicted"] == k for answer in mine)
    rho, labels = explorer._retain.astype(np.float64), explorer._labels
    for i, j in ((0, 1), (3, 3), (9, 0)):  # attention above the base rate
        base, mean = rho[labels != j, j].mean(), rho[labels == i, j].mean()
        assert found["rho"][i][j] == pytest.approx(mean, abs=1e-4)
        assert found["above"][i][j] == pytest.approx(mean - base, abs=1e-4)


def test_a_class_without_test_examples_has_no_row() -> None:
    found = make_explorer(examples=4).map()
    assert [row is None for row in found["rho"]] == [False] * 4 + [True] * 6
    assert found["counts"][9] == [0] * 10


def test_of_more_than_200_classes_the_most_confused_are_mapped() -> None:
    explorer = make_explorer(classes=tuple(map(str, range(230))), shape=(6,), examples=460)
    found = explorer.map()
    shown = found["classes"]
    assert len(shown) == len(found["rho"]) == len(found["counts"]) == 200
    wrong = np.zeros(230, int)
    for t, k in zip(explorer._labels, explorer._predicted, strict=True):
        if t != k:
            wrong[[t, k]] += 1
    left_out = set(range(230)) - set(shown)
    assert max(wrong[k] for k in left_out) <= min(wrong[k] for k in shown)


# --- models and data that do not fit ---------------------------------------------------------------------------------


def test_features_are_explored_without_images() -> None:
    explorer = make_explorer(shape=(6,), classes=("a", "b"))
    about = explorer.about()
    assert (about["images"], about["drawing"], about["uploads"]) == (False, False, False)
    assert explorer.example(0)["image"] is None
    assert explorer.examples()["examples"][0]["image"] is None


def test_weights_that_are_not_finite_are_reported() -> None:
    explorer = make_explorer(examples=3)
    with torch.no_grad():
        explorer.trained.model.head.classifier.weight.fill_(float("nan"))
    with pytest.raises(RunError, match="not finite"):
        explorer.answer(explorer.test.inputs[0])
    with pytest.raises(RunError, match="not finite"):
        Explorer(explorer.trained, explorer.test, "a-run")


def test_data_that_changed_is_reported() -> None:
    explorer = make_explorer(examples=3)
    other = Split(torch.zeros(2, 1, 30, 30, dtype=torch.uint8), torch.tensor([0, 1]))
    with pytest.raises(RunError, match=r"\(1, 30, 30\), but a-run was trained on \(1, 28, 28\)"):
        Explorer(explorer.trained, other, "a-run")
    with pytest.raises(DataError, match="no test examples"):
        Explorer(explorer.trained, Split(explorer.test.inputs[:0], explorer.test.labels[:0]), "a-run")
    with pytest.raises(RunError, match="1,001 classes; the explorer shows up to 1,000"):
        make_explorer(classes=tuple(map(str, range(1001))), shape=(4,), examples=3)


# --- names -----------------------------------------------------------------------------------------------------------


@given(st.text() | st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"]), max_size=5))
def test_a_name_is_shown_without_anything_hidden_in_it(name: str) -> None:
    shown = shown_name(name, 7)
    assert 0 < len(shown) <= 80
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 or c in "\u2028\u2029\u202e\u2066\u200b" for c in shown)
    shown.encode()  # a lone surrogate could not be sent


def test_a_plain_name_stays_as_it_is() -> None:
    for name in ("cat", "<script>alert(1)</script>", "Größe 3 & more", "猫"):
        assert shown_name(name) == name
    assert shown_name("x" * 90) == "x" * 79 + "…"
    assert shown_name("") == "(no name)"


# --- closest calls, two runs, and the base rate ----------------------------------------------------------------------


def test_closest_calls_come_first() -> None:
    explorer = make_explorer(examples=60)
    shown = [row["index"] for row in explorer.examples(order="closest")["examples"]]
    gaps = []
    for index in shown:
        ps = sorted((row["p"] for row in explorer.example(index)["rows"]), reverse=True)
        gaps.append(ps[0] - ps[1])
    assert gaps == pytest.approx(sorted(gaps), abs=1e-5)  # the answers are rounded to six digits


def test_a_second_run_stands_beside_the_first() -> None:
    other = make_explorer(head="softmax", examples=60)
    alone = make_explorer(examples=60)
    both = Explorer(alone.trained, alone.test, "a-run", other)
    assert both.about()["beside"]["head"] == "softmax"
    found = both.example(3)
    expected = other.example(3)
    assert found["beside"]["predicted"] == expected["predicted"]
    assert found["beside"]["rows"] == [row["p"] for row in expected["rows"]]
    assert {key: value for key, value in found.items() if key != "beside"} == alone.example(3)
    differ = both.examples(order="differ")
    assert differ["total"] == both.about()["beside"]["differ"]
    for row in differ["examples"]:
        assert row["predicted"] != other.example(row["index"])["predicted"]
    won = [row["predicted"] == row["true"] for row in differ["examples"]]
    assert won == sorted(won, reverse=True)


def test_runs_on_other_classes_cannot_stand_beside() -> None:
    alone, other = make_explorer(examples=12), make_explorer(classes=("a", "b"), examples=12)
    with pytest.raises(RunError, match="not trained on the same classes"):
        Explorer(alone.trained, alone.test, "a-run", other)
