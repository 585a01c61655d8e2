"""Recipes: readable, complete, and strict about what they do not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dropmax.classifier import Classifier
from dropmax.errors import DropMaxError
from dropmax.heads import HEADS, PAPER_OBJECTIVE, make_head
from dropmax.workbench.networks import make_network
from dropmax.workbench.recipes import TrainingOptions, load_recipe, parse_override, recipe_names
from dropmax.workbench.training import load_data, load_model, train
from dropmax.workbench.training.session import make_optimizer
from dropmax.workbench.training.trained import build

NAMES = recipe_names()


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_whole_and_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    (tmp_path / "copy.toml").write_text(recipe.to_toml())
    assert load_recipe(tmp_path / "copy.toml").to_dict() == recipe.to_dict()
    if name == "own-images.unfrozen":
        pytest.importorskip("efficientnet_lite_pytorch")
    shape = {"mnist": (1, 28, 28), "cifar": (3, 32, 32), "own-f": (7,), "own-t": (7,)}.get(name[:5], (3, 64, 64))
    network = dict(recipe.network)
    make_network(network.pop("name"), shape, **network)
    for head in HEADS:
        options = dict(recipe.override({"head.name": head}).head)
        make_head(options.pop("name"), 4, 3, **options)


def test_the_schedules_of_appendix_c() -> None:
    rates = {
        ("mnist-1k", "paper"): (2000, 50, "adam", {0: 1e-4, 1999: 1e-4}),
        ("mnist-5k", "paper"): (500, 50, "adam", {0: 1e-4}),
        ("mnist-55k", "paper"): (100, 50, "adam", {0: 1e-4}),
        ("cifar-10", "paper"): (200, 128, "sgd", {0: 0.1, 79: 0.1, 80: 0.01, 120: 1e-3, 160: 1e-4}),
        ("cifar-100", "paper"): (200, 128, "sgd", {0: 0.1, 79: 0.1, 80: 0.01, 120: 1e-3, 160: 1e-4}),
        ("awa", "paper"): (300, 125, "sgd", {0: 1e-2, 149: 1e-2, 150: 1e-3, 250: 1e-4}),
        ("awa2", "paper"): (300, 125, "sgd", {0: 1e-2, 149: 1e-2, 150: 1e-3, 250: 1e-4}),
        ("cub", "paper"): (400, 125, "sgd", {0: 1e-2, 199: 1e-2, 200: 1e-3, 300: 1e-4}),
        ("mnist-1k", "released"): (200, 100, "adam", {0: 1e-3, 66: 1e-3, 67: 1e-4, 132: 1e-4, 133: 1e-5}),
    }
    for (data, variant), (epochs, batch, optimizer, at) in rates.items():
        training = load_recipe(data, variant).training
        assert (training.epochs, training.batch_size, training.optimizer) == (epochs, batch, optimizer)
        assert {epoch: training.learning_rate_at(epoch) for epoch in at} == at
    assert load_recipe("cub").training.weight_decay == 1e-3
    assert load_recipe("mnist-1k", "released").training.decay_exempt == ("theta", "phi")


@pytest.mark.parametrize(("variant", "bias"), [("paper", 0.1), ("released", 0.0)])
@pytest.mark.parametrize("data", ["mnist-1k", "mnist-5k", "mnist-55k"])
def test_heads_start_and_pixels_are_scaled_as_in_the_recipes_source(data: str, variant: str, bias: float) -> None:
    recipe = load_recipe(data, variant)
    model = build(recipe, (1, 28, 28), 10)
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    assert len(layers) == 6  # three of the network, three of the head
    assert all(bool((layer.bias == torch.tensor(bias)).all()) for layer in layers)
    assert recipe.data.standardise is False


def test_pixels_that_are_not_standardised_reach_the_network_in_0_to_1(tmp_path: Path) -> None:
    recipe = load_recipe("mnist-1k", "released").override({"training.epochs": 1, "data.train_size": 100})
    data = load_data(recipe)
    assert (data.mean, data.std) == ((0.0,), (1.0,))
    standardised = load_data(recipe.override({"data.standardise": True}))
    assert standardised.mean[0] == pytest.approx(0.13, abs=0.01)  # of MNIST
    run = train(recipe, tmp_path / "run", quiet=True)
    x = load_model(run.path).prepare(data.test.inputs[:8])  # what predict, export and the explorer use
    assert (x.min().item(), x.max().item()) == (0.0, 1.0)


def test_a_cosine_schedule_falls_from_the_rate_to_nearly_nothing() -> None:
    options = TrainingOptions(epochs=10, learning_rate=1.0, schedule="cosine")
    rates = [options.learning_rate_at(epoch) for epoch in range(10)]
    assert rates[0] == 1.0
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.03


def test_choosing_another_head_drops_the_options_of_the_one_before() -> None:
    recipe = load_recipe("mnist-1k", "paper")
    options = {"stop_gradient": "parameters", **PAPER_OBJECTIVE}
    assert recipe.head == {"name": "dropmax", **options}
    assert recipe.override({"head.name": "softmax"}).head == {"name": "softmax"}
    back = recipe.override({"head.name": "softmax"}).override({"head.temperature": 1.0, "head.name": "dropmax"})
    assert back.head == {"name": "dropmax", **options, "temperature": 1.0}


@pytest.mark.parametrize("name", [name for name in recipe_names() if name.endswith((".paper", ".released"))])
def test_the_papers_recipes_keep_the_papers_objective_whatever_the_default_is(name: str) -> None:
    assert load_recipe(name).head.items() >= PAPER_OBJECTIVE.items()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"training.epoch": 5}, "unknown key of [training] 'epoch': did you mean 'epochs'"),
        ({"data.nme": "x"}, "unknown key of [data] 'nme': did you mean 'name'"),
        ({"trainig.epochs": 5}, "cannot set 'trainig.epochs'"),
        ({"training": 5}, "cannot set 'training'"),
        ({"training.epochs": 0}, "training.epochs must be at least 1, got 0"),
        ({"training.epochs": 1.5}, "training.epochs must be a whole number, got 1.5"),
        ({"training.epochs": True}, "training.epochs must be a whole number, got True"),
        ({"training.learning_rate": 0}, "training.learning_rate must be finite and above 0"),
        ({"training.learning_rate": "fast"}, "training.learning_rate must be a number, got 'fast'"),
        ({"training.weight_decay": -1}, "training.weight_decay must be finite and not below 0"),
        ({"training.optimizer": "adma"}, "unknown training.optimizer 'adma': did you mean 'adam'"),
        ({"training.precision": "fp16"}, "unknown training.precision 'fp16'"),
        ({"training.milestones": [80, 120]}, "shares of the epochs between 0 and 1"),
        ({"training.milestones": 0.5}, "training.milestones must be a list, got 0.5"),
        ({"training.decay_exempt": ["theta", "chi"]}, "unknown training.decay_exempt 'chi'"),
        ({"training.head_init": "gloro"}, "unknown training.head_init 'gloro': did you mean 'glorot'"),
        ({"data.augment": "flip"}, "unknown data.augment 'flip'"),
        ({"data.standardise": 1}, "data.standardise must be true or false, got 1"),
        ({"training.compile": "yes"}, "training.compile must be true or false, got 'yes'"),
    ],
)
def test_bad_overrides(override: dict[str, Any], message: str) -> None:
    with pytest.raises(DropMaxError) as caught:
        load_recipe("mnist-1k").override(override)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[data", "is not valid TOML"),
        (b"[data]\nname = 3", "[data] needs a name"),
        (b"[data]\nname = 'x'\n[network]\nname = 'lenet'\n", "[head] needs a name"),
        (b"[datum]\nname = 'x'", "unknown table 'datum': did you mean 'data'"),
        (b"data = 3", "[data] must be a table, got 3"),
        (b"\xff\xfe", "cannot read the recipe"),
        (None, "mine.toml: No such file"),
    ],
)
def test_bad_files(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DropMaxError) as caught:
        load_recipe(path)
    assert message in str(caught.value)
    assert "mine.toml" in str(caught.value)


def test_names_that_no_recipe_has() -> None:
    with pytest.raises(DropMaxError, match="unknown data set 'minst-1k': did you mean 'mnist-1k'"):
        load_recipe("minst-1k")
    with pytest.raises(DropMaxError, match="unknown recipe for cub 'released': Valid are paper"):
        load_recipe("cub", "released")


def test_overrides_from_the_command_line() -> None:
    assert parse_override("training.milestones=[0.5]") == ("training.milestones", [0.5])
    assert parse_override("head.stop_gradient=logits") == ("head.stop_gradient", "logits")
    assert parse_override("data.name=a=b") == ("data.name", "a=b")
    for text in ("training.epochs", "=5"):
        with pytest.raises(DropMaxError, match="--set takes NAME=VALUE"):
            parse_override(text)


THETA = "theta.weight theta.bias"


@pytest.mark.parametrize(
    ("override", "decayed"),
    [
        ({}, "psi.weight psi.bias phi.weight phi.bias net.weight net.bias norm"),  # of the paper: all but theta
        ({"decay_exempt": ["theta", "phi"]}, "psi.weight psi.bias net.weight net.bias norm"),
        ({"decay_exempt": []}, "psi.weight psi.bias net.weight net.bias norm phi.weight phi.bias " + THETA),
        ({"decay_biases": False}, "psi.weight phi.weight net.weight"),
    ],
)
def test_which_parameters_decay(override: dict[str, Any], decayed: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6))
    head = make_head("dropmax", 6, 3)
    names: dict[int, str] = {id(p): "norm" for p in net[2].parameters()}
    for name, layer in {"psi": head.classifier, "theta": head.retain, "phi": head.correction, "net": net[1]}.items():
        names |= {id(p): f"{name}.{kind}" for kind, p in layer.named_parameters()}
    recipe = load_recipe("mnist-1k", "paper").override({f"training.{key}": value for key, value in override.items()})
    groups = make_optimizer(Classifier(net, head), recipe).param_groups
    found = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
    assert found == set(decayed.split())
    assert {names[id(p)] for group in groups for p in group["params"]} == set(names.values())
    assert {group["weight_decay"] for group in groups} <= {0.0, recipe.training.weight_decay}


@pytest.mark.parametrize("head", ["deterministic-attention", "deterministic-dropmax", "dropmax-qp"])
def test_the_gates_of_the_baselines_count_as_theta(head: str) -> None:
    model = Classifier(nn.Flatten(), make_head(head, 6, 3))
    recipe = load_recipe("mnist-1k", "paper").override({"head.name": head})
    free = [
        p for group in make_optimizer(model, recipe).param_groups if not group["weight_decay"] for p in group["params"]
    ]
    assert {id(p) for p in free} == {id(p) for p in model.head.retain.parameters()}


def test_the_three_recipes_for_features_differ_in_their_data_only() -> None:
    plain, photographs, texts = (
        {**load_recipe(name).to_dict(), "data": None} for name in ("own-features", "own-images.pretrained", "own-text")
    )
    assert plain == photographs == texts
    assert plain["training"]["refit"], "with few rows, held-out ones must not be lost"
