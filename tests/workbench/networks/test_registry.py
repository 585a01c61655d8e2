"""Networks by name, and the user's own by import path."""

from __future__ import annotations

import importlib
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dropmax.errors import InvalidType, InvalidValue
from dropmax.workbench.networks import NETWORKS, CifarResNet, LeNet, ResNet, TutorialCNN, feature_size, make_network

torch.set_num_threads(1)

USER_MODULE = """
import torch
from torch import nn

calls = []

class Declares(nn.Module):
    def __init__(self, input_shape, width=7):
        super().__init__()
        calls.append(input_shape)
        self.out_features = width
        self.fc = nn.Linear(input_shape[0], width)
    def forward(self, x):
        return self.fc(x)

class Silent(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, 6, 3), nn.BatchNorm2d(6), nn.Dropout(), nn.Flatten())
        self.body[1].eval()
    def forward(self, x):
        return self.body(x)

class TakesAnything(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options
        self.out_features = 3

class Maps(nn.Module):
    def forward(self, x):
        return x

class Lists(nn.Module):
    def forward(self, x):
        return [x]

class Breaks(nn.Module):
    def forward(self, x):
        raise RuntimeError("no such luck")

class Strange(nn.Module):
    out_features = "many"

class Negative(nn.Module):
    out_features = -1

def function():
    raise AssertionError("must not be called")
"""


unique = itertools.count()


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's on sys.path, under a name no other test has imported."""
    name = f"users_module_{os.getpid()}_{next(unique)}"
    (tmp_path / f"{name}.py").write_text(USER_MODULE)
    (tmp_path / f"{name}_broken.py").write_text("1 / 0")
    (tmp_path / f"{name}_needs.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize("name", NETWORKS)
def test_every_name_makes_a_network_that_fits_its_out_features(name: str) -> None:
    if name.startswith("efficientnet"):
        pytest.importorskip("efficientnet_lite_pytorch")
    network = make_network(name, (3, 32, 32)).eval()
    with torch.no_grad():
        assert network(torch.zeros(1, 3, 32, 32)).shape == (1, network.out_features)


def test_options_reach_the_network() -> None:
    assert make_network("mlp", [8, 8], hidden=[5]).out_features == 5
    assert make_network("cifar-resnet", (3, 32, 32), depth=8, widths=(4, 4, 9)).out_features == 9
    tutorial = make_network("tutorial-cnn", (1, 28, 28), dropout=0.25)
    assert isinstance(tutorial, TutorialCNN)
    assert tutorial.dropout.p == 0.25


@pytest.mark.parametrize(("name", "kernel", "blocks"), [("resnet18", 7, 8), ("resnet34-cifar", 3, 16)])
def test_names_of_resnets_settle_depth_and_stem(name: str, kernel: int, blocks: int) -> None:
    network = make_network(name, (1, 32, 32), widths=(4, 4, 4, 4))
    assert isinstance(network, ResNet)
    assert network.conv.kernel_size == (kernel, kernel)
    assert sum(len(stage) for stage in network.stages) == blocks  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "shape", "options", "kind", "message"),
    [
        ("lenett", (1, 28, 28), {}, InvalidValue, "unknown network 'lenett': did you mean 'lenet'"),
        ("vgg", (1, 28, 28), {}, InvalidValue, "your own is package.module:Class"),
        ("os.path", (1, 28, 28), {}, InvalidValue, "unknown network 'os.path'"),
        (3, (1, 28, 28), {}, InvalidType, "named by a string, such as 'lenet', got 3"),
        ("lenet", 28, {}, InvalidType, "input_shape must be a sequence of integers, got 28"),
        ("mlp", (), {}, InvalidValue, r"input_shape is \(\): give the shape of one example"),
        ("cifar-resnet", (3, 8, 8), {"deepth": 9}, InvalidValue, "'deepth': did you mean 'depth'. Valid are depth, wi"),
        ("resnet18", (3, 64, 64), {"depth": 34}, InvalidValue, "'resnet18' settles depth at 18"),
        ("mlp", (4,), {"in_features": 5}, InvalidValue, "'mlp' settles in_features at 4"),
        ("mlp:", (4,), {}, InvalidValue, "cannot read network 'mlp:'"),
        (":MLP", (4,), {}, InvalidValue, "cannot read network ':MLP'"),
        ("a:b:c", (4,), {}, InvalidValue, "your own as package.module:ClassName"),
        ("..evil:Net", (4,), {}, InvalidValue, "cannot read network"),
        ("no_such.net:Net", (4,), {}, InvalidValue, "no module 'no_such'; is it installed, or its folder on PYTH"),
        ("os:getcwd", (4,), {}, InvalidType, "must be a class deriving from torch.nn.Module, got <"),
    ],
)
def test_wrong_names_and_options(
    name: Any, shape: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        make_network(name, shape, **options)


def test_a_name_without_a_colon_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"imported {name}")

    monkeypatch.setattr(importlib, "import_module", refuse)
    for name in ("torch.nn.Linear", "os", "lenet.py"):
        with pytest.raises(InvalidValue, match="unknown network"):
            make_network(name, (4,))


def test_users_class_gets_the_shape_and_its_options(user: str) -> None:
    network = make_network(f"{user}:Declares", [5], width=4)
    assert importlib.import_module(user).calls == [(5,)]
    assert network(torch.zeros(2, 5)).shape == (2, 4)
    assert network.out_features == 4
    assert make_network(f"{user}:TakesAnything", (4,), colour="blue").options == {"colour": "blue"}


def test_users_class_without_out_features_is_asked_by_a_forward_pass(user: str) -> None:
    network = make_network(f"{user}:Silent", (2, 8, 8), channels=2)
    assert network.out_features == 6 * 6 * 6
    norm = network.body[1]  # type: ignore[index]
    assert int(norm.num_batches_tracked) == 0
    assert network.training
    assert not norm.training, "a module the user has put into evaluation mode stays there"


@pytest.mark.parametrize(
    ("path", "options", "kind", "message"),
    [
        ("{}:Declare", {}, InvalidValue, "has no 'Declare'; did you mean 'Declares'"),
        ("{}:Zzzzz", {}, InvalidValue, "has no 'Zzzzz'; check the name"),
        ("{}:function", {}, InvalidType, "must be a class deriving from torch.nn.Module, got <function"),
        ("{}_broken:Net", {}, InvalidValue, r"_broken.py, line 1: ZeroDivisionError: division by zero\)"),
        ("{}_needs:Net", {}, InvalidValue, "no module 'a_package_that_is_not_there'; .*_needs imports it"),
        ("{}:Silent", {}, InvalidValue, "needs the option channels"),
        ("{}:Silent", {"chanels": 1}, InvalidValue, "unknown option .* 'chanels': did you mean 'channels'"),
        ("{}:Maps", {"depth": 1}, InvalidValue, "There are none"),
        ("{}:Maps", {}, InvalidValue, r"a tensor of shape \(N, F\), got shape \(1, 2, 8, 8\)"),
        ("{}:Lists", {}, InvalidValue, r"a tensor of shape \(N, F\), got list"),
        ("{}:Breaks", {}, InvalidValue, r"shape \(1, 2, 8, 8\) failed \(RuntimeError: no such luck\): set self.out_f"),
        ("{}:Strange", {}, InvalidType, "Strange.out_features must be an integer, got 'many'"),
        ("{}:Negative", {}, InvalidValue, "Negative.out_features must be positive, got -1"),
    ],
)
def test_what_is_wrong_with_a_users_class(
    user: str, path: str, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        make_network(path.format(user), (2, 8, 8), **options)


def test_feature_size_reads_or_infers() -> None:
    assert feature_size(LeNet(), (1, 28, 28)) == 500
    assert feature_size(nn.Sequential(CifarResNet(depth=8), nn.Linear(64, 3)), (3, 16, 16)) == 3
