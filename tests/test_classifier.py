"""Joining a network and a head, and swapping a model's last layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dropmax import Classifier, DropMax, DropMaxError, Loss, replace_head


class WithFC(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x).relu())


class WithClassifierBlock(WithFC):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Identity()
        self.classifier = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.body(x).relu())


class LikeTimm(WithFC):
    """The interface of timm: get_classifier says which layer it is, whatever its name."""

    def __init__(self) -> None:
        super().__init__()
        self.odd_name = self.fc
        del self.fc

    def get_classifier(self) -> nn.Module:
        return self.odd_name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.odd_name(self.body(x).relu())


class Ambiguous(WithFC):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 7)


class Unusual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.last = nn.Linear(16, 5)


def test_a_classifier_gives_logits_and_with_labels_a_loss() -> None:
    model = Classifier(nn.Linear(8, 16), DropMax(16, 5))
    x, y = torch.randn(3, 8), torch.tensor([0, 1, 2])
    assert model(x).shape == (3, 5)
    assert isinstance(model(x, y), Loss)
    torch.testing.assert_close(model.predict_proba(x), model(x).softmax(-1))
    groups = model.param_groups(0.1)
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
    assert [g["weight_decay"] for g in groups] == [0.1, 0.1, 0.0]


def test_a_classifier_wants_a_head() -> None:
    with pytest.raises(DropMaxError, match="got Linear: make one with make_head"):
        Classifier(nn.Identity(), nn.Linear(3, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("model_type", [WithFC, WithClassifierBlock, LikeTimm])
def test_replacing_the_last_layer_keeps_the_trained_class_logits(model_type: type[nn.Module]) -> None:
    model = model_type().eval().double()
    x = torch.randn(3, 8, dtype=torch.float64)
    before = model(x)
    new = replace_head(model, "dropmax")
    features = new.net(x)
    assert features.shape == (3, new.head.in_features)
    assert next(new.head.parameters()).dtype == torch.float64
    torch.testing.assert_close(new.head.classifier(features), before)
    new(x, torch.tensor([0, 1, 2])).total.backward()
    assert all(p.grad is not None for p in new.parameters())


def test_options_and_the_number_of_classes_reach_the_head() -> None:
    new = replace_head(WithFC(), "random-dropmax", num_classes=9, retain=0.2)
    assert repr(new.head) == "RandomDropMax(in_features=16, num_classes=9, retain=0.2)"
    meta = replace_head(WithFC().to("meta"), "dropmax")
    assert meta.head.retain.weight.device.type == "meta"


def test_a_layer_without_bias() -> None:
    model = WithFC()
    model.fc = nn.Linear(16, 5, bias=False)
    assert (replace_head(model).head.classifier.bias == 0).all()


@pytest.mark.parametrize(
    ("model", "name", "message"),
    [
        (Ambiguous(), None, r"several candidates for the last layer \(fc, head\): pass name=, one of body \(8 -> 16\)"),
        (Unusual(), None, r"none of the usual last layers .*: pass name=, one of first \(8 -> 16\), last \(16 -> 5\)"),
        (nn.Conv2d(1, 1, 1), None, r"no nn\.Linear at all"),
        (WithFC(), "fcc", r"has no layer 'fcc': name must be one of body"),
        (WithClassifierBlock(), "classifier.1", r"has a ReLU, not an nn\.Linear, as 'classifier\.1'"),
    ],
)
def test_a_clear_error_lists_the_candidates_and_nothing_is_changed(
    model: nn.Module, name: str | None, message: str
) -> None:
    before = repr(model)
    with pytest.raises(DropMaxError, match=message):
        replace_head(model, name=name)
    assert repr(model) == before


def test_an_unknown_head_leaves_the_model_alone() -> None:
    model = WithFC()
    with pytest.raises(DropMaxError, match="unknown head"):
        replace_head(model, "nope")
    assert isinstance(model.fc, nn.Linear)
    replace_head(Ambiguous(), name="head")


def test_the_way_back_to_softmax_keeps_the_class_logits() -> None:
    model = replace_head(WithFC(), "dropmax")
    x = torch.randn(3, 8)
    logits = model.head.classifier(model.net(x))
    back = replace_head(model, "softmax")
    assert back.head.name == "softmax"
    assert torch.equal(back(x), logits)  # the same weights, by the same product
    assert back(x, torch.tensor([0, 1, 2])).total.isfinite()


def test_of_two_heads_none_is_chosen_silently() -> None:
    model = nn.ModuleDict({"one": DropMax(4, 3), "two": DropMax(4, 3)})
    with pytest.raises(DropMaxError, match=r"holds 2 dropmax heads \(one, two\)"):
        replace_head(model, "softmax")
