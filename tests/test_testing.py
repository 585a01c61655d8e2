"""The conformance kit: our own heads pass it, and a head with a fault is told which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """A head whose terms are one function of itself, its logits and the target."""

    row: Callable[[Any, Tensor, Tensor], Tensor] = Head.cross_entropy

    def terms(self, logits: Mapping[str, Tensor], target: Tensor, noise: Tensor | None) -> dict[str, Tensor]:
        return {"cross_entropy": self.row(logits["classifier"], target)}


def with_row(name: str, row: Callable[[Any, Tensor, Tensor], Tensor]) -> type[Head]:
    return type(name, (Good,), {"row": row})


def twice_weighted(head: Head, o: Tensor, y: Tensor) -> Tensor:
    return head.cross_entropy(o, y) * (1.0 if head.class_weight is None else head.class_weight[y])


WRONG_SHAPE = with_row("WrongShape", lambda head, o, y: o.log_softmax(-1))
NOT_FINITE = with_row("NotFinite", lambda head, o, y: (o * 0).sum(-1).log())
MEAN = with_row("Mean", lambda head, o, y: head.cross_entropy(o, y) - head.cross_entropy(o, y).mean())
STOPPED = with_row("Stopped", lambda head, o, y: head.cross_entropy(o, y) * head.cross_entropy(o, y).detach())
NUMBERED = with_row("Numbered", lambda head, o, y: (y + 1) * head.cross_entropy(o, y))
TWICE_WEIGHTED = with_row("TwiceWeighted", twice_weighted)
NARROW = with_row("Narrow", lambda head, o, y: -o.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1))
NO_TERMS = type("NoTerms", (Good,), {"terms": lambda self, logits, target, noise: {}})
NO_SUM = type("NoSum", (Good,), {"probabilities": lambda self, logits, *_: logits["classifier"].float().sigmoid()})


class Entangled(Good):
    separable = True

    def prediction_logits(self, logits: Mapping[str, Tensor]) -> Tensor:
        return logits["classifier"] * logits["classifier"].norm(dim=-1, keepdim=True)


class Scaled(Good):
    def __init__(self, in_features: int, num_classes: int, *, scale: float = 2.0, **shared: Any) -> None:
        super().__init__(in_features, num_classes, **shared)
        self.scale = scale / 2  # so that config() says something else

    def row(self, o: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return self.scale * self.cross_entropy(o, y)


class Hidden(Scaled):
    def observe(self, logits: Mapping[str, Tensor], target: Tensor, counts: Tensor) -> None:
        self.scale = self.scale + 1  # not a buffer


class Counting(Good):
    """It counts ignored rows too."""

    seen: Tensor

    def __init__(self, in_features: int, num_classes: int, **shared: Any) -> None:
        super().__init__(in_features, num_classes, **shared)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def observe(self, logits: Mapping[str, Tensor], target: Tensor, counts: Tensor) -> None:
        self.seen += len(target)


def test_a_head_of_ten_lines_passes() -> None:
    expected = (
        "hooks, loss, reductions, rows, gradients, dtypes, empty, ignored, permutation, predictions, top, masks, "
    )
    assert ", ".join(check_head(Good)) == expected + "state, config, class weight, packing"


@pytest.mark.parametrize(
    ("head", "says"),
    [
        (WRONG_SHAPE, r"WrongShape: terms\(\)\['cross_entropy'\] must hold one number per row, .*\(6,\), got \(6, 7\)"),
        (NOT_FINITE, r"NotFinite: terms\(\)\['cross_entropy'\] holds a number that is not finite"),
        (NO_TERMS, r"terms\(\) must return a dict of tensors, got \{\}"),
        (Head, "a class deriving from dropmax.Head, got dropmax.Head itself"),
        (MEAN, "the loss of row 0 depends on the other rows"),
        (STOPPED, r"the gradient of the features is not that of the loss .* set stops_gradient = True"),
        (NUMBERED, "the loss changes if the classes are numbered differently"),
        (TWICE_WEIGHTED, r"class_weight must multiply the loss of a row \(see class_weighted\)"),
        (Entangled, "separable is not true"),
        (Hidden, r"state_dict\(\) does not hold everything"),
        (Scaled, r"a head made from config\(\) has another"),
        (Counting, "rows with the label ignore_index change seen"),
        (NARROW, r"the loss of torch.float16 features must be float32, got torch.float16"),
        (NO_SUM, r"rows of predict_proba\('mean'\) do not sum to 1"),
    ],
)
def test_what_is_wrong_with_a_head(head: type[Head], says: str) -> None:
    with pytest.raises((HeadError, InvalidType), match=says):
        check_head(head)


def test_a_loss_of_the_wrong_shape_or_not_finite_is_refused_in_training_too() -> None:
    features, target = torch.randn(4, 3), torch.arange(4)
    message = r"WrongShape.terms: 'cross_entropy' must hold one number per row, .* \(4, 5\)"
    for head, says in ((WRONG_SHAPE, message), (NOT_FINITE, r"the losses hold -inf")):
        with pytest.raises(InvalidValue, match=says):
            head(3, 5).loss(features, target)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(InvalidType, match="unknown option of softmax 'gamma'"):
        check_head(Softmax, gamma=1.0)
