"""The conformance kit: our own heads pass it, and a head with a fault is told which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from dropmax import Head, Softmax
from dropmax.errors import InvalidType, InvalidValue
from dropmax.heads import ABLATIONS, FURTHER, HEADS
from dropmax.testing import HeadError, check_head

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in (*HEADS, *FURTHER, *ABLATIONS)),
    ("dropmax", {"likelihood": "exact"}),
    ("dropmax", {"samples": 2, "rank": 2}),
    ("dropmax", {"mask_gradient": True, "stop_gradient": "parameters"}),
    ("focal", {"gamma": 0.5, "label_smoothing": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_our_own_heads_pass(name: str, options: dict[str, Any]) -> None:
    assert "permutation" in check_head(name, **options)


@pytest.mark.parametrize("name", ["softmax", "online-label-smoothing"])
def test_compiled_too(name: str) -> None:
    assert check_head(name, compile=True)[-1] == "compiled"


class Good(Head):
    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        return {"cross_entropy": self.cross_entropy(logits["classifier"], target)}


class WrongShape(Good):
    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        return {"cross_entropy": logits["classifier"].log_softmax(-1)}


class NotFinite(Good):
    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        return {"cross_entropy": (logits["classifier"] * 0).sum(-1).log()}


class NoTerms(Good):
    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        return {}


class Mean(Good):
    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        row = self.cross_entropy(logits["classifier"], target)
        return {"cross_entropy": row - row.mean()}


class Stopped(Good):
    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        row = self.cross_entropy(logits["classifier"], target)
        return {"cross_entropy": row * row.detach()}


class Numbered(Good):
    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        return {"cross_entropy": (target + 1) * self.cross_entropy(logits["classifier"], target)}


class TwiceWeighted(Good):
    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        row = self.cross_entropy(logits["classifier"], target)
        return {"cross_entropy": row if self.class_weight is None else row * self.class_weight[target]}


class Entangled(Good):
    separable = True

    def prediction_logits(self, logits: Mapping[str, Tensor]) -> Tensor:
        return logits["classifier"] * logits["classifier"].norm(dim=-1, keepdim=True)


class Hidden(Good):
    def __init__(self, in_features: int, num_classes: int, **shared: Any) -> None:
        super().__init__(in_features, num_classes, **shared)
        self.scale = torch.ones((), dtype=torch.float64)  # not a buffer

    def observe(self, logits: Mapping[str, Tensor], target: Tensor, counts: Tensor) -> None:
        self.scale = self.scale + 1

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        return {"cross_entropy": self.scale * self.cross_entropy(logits["classifier"], target)}


class Forgetful(Good):
    def __init__(self, in_features: int, num_classes: int, *, scale: float = 2.0, **shared: Any) -> None:
        super().__init__(in_features, num_classes, **shared)
        self.scale = scale / 2

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        return {"cross_entropy": self.scale * self.cross_entropy(logits["classifier"], target)}


class Counting(Good):
    """It counts ignored rows too."""

    seen: Tensor

    def __init__(self, in_features: int, num_classes: int, **shared: Any) -> None:
        super().__init__(in_features, num_classes, **shared)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def observe(self, logits: Mapping[str, Tensor], target: Tensor, counts: Tensor) -> None:
        self.seen += len(target)


class Narrow(Good):
    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        o = logits["classifier"]
        return {"cross_entropy": -o.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)}


class NoSum(Good):
    def probabilities(self, logits: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return logits["classifier"].float().sigmoid()


def test_a_head_of_ten_lines_passes() -> None:
    expected = (
        "hooks, loss, reductions, rows, gradients, dtypes, empty, ignored, permutation, predictions, top, masks, "
    )
    assert ", ".join(check_head(Good)) == expected + "state, config, class weight, packing"


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (
            WrongShape,
            r"WrongShape: terms\(\)\['cross_entropy'\] must hold one number per row, shape \(6,\), got \(6, 7\)",
        ),
        (NotFinite, r"NotFinite: terms\(\)\['cross_entropy'\] holds a number that is not finite"),
        (NoTerms, r"terms\(\) must return a dict of tensors, got \{\}"),
        (Head, "a class deriving from dropmax.Head, got dropmax.Head itself"),
        (Mean, "the loss of row 0 depends on the other rows"),
        (Stopped, r"the gradient of the features is not that of the loss .* set stops_gradient = True"),
        (Numbered, "the loss changes if the classes are numbered differently"),
        (TwiceWeighted, r"class_weight must multiply the loss of a row \(see class_weighted\)"),
        (Entangled, "separable is not true"),
        (Hidden, r"state_dict\(\) does not hold everything"),
        (Forgetful, r"a head made from config\(\) has another"),
        (Counting, "rows with the label ignore_index change seen"),
        (Narrow, r"the loss of torch.float16 features must be float32, got torch.float16"),
        (NoSum, r"rows of predict_proba\('mean'\) do not sum to 1"),
    ],
)
def test_what_is_wrong_with_a_head(head: type[Head], says: str) -> None:
    with pytest.raises((HeadError, InvalidType), match=says):
        check_head(head)


def test_a_loss_of_the_wrong_shape_or_not_finite_is_refused_in_training_too() -> None:
    features, target = torch.randn(4, 3), torch.arange(4)
    with pytest.raises(
        InvalidValue, match=r"WrongShape.terms: 'cross_entropy' must hold one number per row, .* \(4, 5\)"
    ):
        WrongShape(3, 5).loss(features, target)
    with pytest.raises(InvalidValue, match=r"the losses hold -inf"):
        NotFinite(3, 5).loss(features, target)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(InvalidType, match="unknown option of softmax 'gamma'"):
        check_head(Softmax, gamma=1.0)
