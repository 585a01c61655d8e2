"""A conformance kit for heads: ``check_head(MyHead)``, in the manner of scikit-learn's ``check_estimator``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dropmax.errors import DropMaxError, InvalidType, InvalidValue
from dropmax.heads import MODES, Head, find_head, make_head
from dropmax.packed import DropMaxLoss, PackedHead

__all__ = ["HeadError", "check_head"]

F64 = torch.float64

#: Sizes that no other dimension has: a dimension of this size is that of the classes.
_FEATURES, _CLASSES, _ROWS = 5, 7, 6


class HeadError(InvalidValue, AssertionError):
    """A head does not do what every head must."""


def check_head(head: str | type[Head], *, compile: bool = False, **options: Any) -> list[str]:
    """Check that a head does what every head must; raise :class:`HeadError` at the first thing it does not.

    Gradients are compared with finite differences in float64, unless the head says that it stops some on purpose
    (:attr:`dropmax.Head.stops_gradient`). Everything is computed on the CPU with a few rows, in a second or so.

    Args:
        head: the class, or a name (:func:`dropmax.heads.find_head`).
        compile: compile the loss and the prediction too, which takes longer.
        options: for the head's constructor.

    Returns:
        What was checked.

    >>> from dropmax import Softmax
    >>> check_head(Softmax)[:4]
    ['hooks', 'loss', 'reductions', 'rows']
    """
    cls = find_head(head)
    checks: list[Callable[[_Case], None]] = [
        _hooks, _loss, _reductions, _rows, _gradients, _dtypes, _empty, _ignored, _permutation,
        _predictions, _top, _masks, _state, _config,
    ]  # fmt: skip
    if cls.packable:  # else a loss() of its own may add what no row has
        checks += [_class_weight, _packing]
    if compile:
        checks.append(_compiled)
    with torch.random.fork_rng(devices=[]):
        for check in checks:
            torch.manual_seed(0)
            case = _Case(cls, options)
            try:
                check(case)
            except HeadError:
                raise
            except Exception as error:
                said = next(iter(str(error).splitlines()), "")
                kind = "" if isinstance(error, DropMaxError) else f"{type(error).__name__}: "
                raise HeadError(f"{cls.__name__}: {_name(check)}: {kind}{said}") from error
    return [_name(check) for check in checks]


def _name(check: Callable[[_Case], None]) -> str:
    return check.__name__.strip("_").replace("_", " ")


class _Case:
    """A head of float64 in evaluation mode, where it changes no state, and a batch."""

    def __init__(self, cls: type[Head], options: dict[str, Any]) -> None:
        self.cls, self.options = cls, options
        self.head = self.make()
        self.features = torch.randn(_ROWS, _FEATURES, dtype=F64)
        self.target = torch.arange(_ROWS) % _CLASSES
        shape = self.head.noise_shape(_ROWS)
        self.noise = None if shape is None else torch.rand(shape, dtype=F64)

    def make(self, **options: Any) -> Head:
        return make_head(self.cls, _FEATURES, _CLASSES, dtype=F64, **{**self.options, **options}).eval()

    def twin(self, dtype: torch.dtype = F64, **options: Any) -> Head:
        """Return another head with the same parameters and state."""
        twin = self.make(**options).to(dtype)
        twin.load_state_dict({name: value.to(dtype) for name, value in self.head.state_dict().items()})
        return twin

    def rows(self, head: Head | None = None, target: Tensor | None = None, noise: Tensor | None = None) -> Tensor:
        """Return the loss of each row."""
        target, noise = self.target if target is None else target, self.noise if noise is None else noise
        return (head or self.head).loss(self.features, target, reduction="none", noise=noise).total

    def expect(self, condition: bool | Tensor, message: str) -> None:
        if not bool(condition):
            raise HeadError(f"{self.cls.__name__}: {message}")

    def same(self, actual: Tensor, expected: Tensor, message: str) -> None:
        if actual.shape != expected.shape:
            self.expect(False, f"{message}: shapes {tuple(actual.shape)} and {tuple(expected.shape)}")
        close = torch.allclose(actual.double(), expected.double(), rtol=1e-9, atol=1e-9)
        self.expect(close, f"{message}: {_shown(actual)} and {_shown(expected)}")

    def probabilities(self, found: Tensor, what: str) -> None:
        self.expect(found.shape == (_ROWS, _CLASSES), f"{what} must return (N, K), got {tuple(found.shape)}")
        self.expect(((found >= 0) & (found <= 1)).all(), f"{what} holds numbers outside [0, 1]")


def _shown(x: Tensor) -> str:
    return str([float(f"{value:.6g}") for value in x.detach().flatten()[:4].tolist()])


def _hooks(case: _Case) -> None:
    logits = case.head.logits(case.features)
    case.expect(
        isinstance(logits, dict) and "classifier" in logits, "logits() must return a dict of tensors with 'classifier'"
    )
    for name, x in logits.items():
        expected = (_ROWS, _CLASSES)
        case.expect(x.shape == expected, f"logits()[{name!r}] must have shape (N, K), {expected}, got {tuple(x.shape)}")
    terms = case.head.terms(logits, case.target, case.noise)
    case.expect(isinstance(terms, dict) and len(terms) > 0, f"terms() must return a dict of tensors, got {terms!r}")
    for name, x in terms.items():
        case.expect(
            isinstance(x, Tensor) and x.shape == (_ROWS,),
            f"terms()[{name!r}] must hold one number per row, shape ({_ROWS},), got {tuple(getattr(x, 'shape', ()))}",
        )
        case.expect(x.isfinite().all(), f"terms()[{name!r}] holds a number that is not finite")
    for name, weight in case.head.term_weights().items():
        case.expect(math.isfinite(weight), f"term_weights()[{name!r}] is {weight}")


def _loss(case: _Case) -> None:
    total, terms = case.head.loss(case.features, case.target, noise=case.noise)
    case.expect(total.shape == (), f"loss() must return one number, got shape {tuple(total.shape)}")
    case.expect(total.isfinite(), f"loss() is {total.item()}")
    case.expect(total.requires_grad, "loss() has no gradient")
    weights = case.head.term_weights()
    if case.head.packable:
        summed = sum((weights.get(name, 1.0) * x.double() for name, x in terms.items()), torch.zeros((), dtype=F64))
        case.same(total, summed, "loss() is not the weighted sum of its terms")
    case.same(case.rows(), case.rows(), "two calls of loss() with the same noise, in evaluation mode, differ")


def _reductions(case: _Case) -> None:
    rows = case.rows()
    for reduction, expected in (("mean", rows.mean()), ("sum", rows.sum())):
        found = case.head.loss(case.features, case.target, reduction=reduction, noise=case.noise).total
        case.same(found, expected, f"reduction {reduction!r} does not follow from the losses of the rows")


def _rows(case: _Case) -> None:
    whole = case.rows()
    for i in range(_ROWS):
        noise = None if case.noise is None else case.noise[..., i : i + 1, :]
        alone = case.head.loss(case.features[i : i + 1], case.target[i : i + 1], noise=noise).total
        case.same(alone, whole[i], f"the loss of row {i} depends on the other rows")


def _gradients(case: _Case) -> None:
    names = ["the features", *(name for name, _ in case.head.named_parameters())]
    inputs = (case.features.clone().requires_grad_(), *case.head.parameters())

    def loss(features: Tensor, *_: Tensor) -> Tensor:  # the parameters are changed in place
        return case.head.loss(features, case.target, noise=case.noise).total

    found = torch.autograd.grad(loss(*inputs), inputs, allow_unused=True)
    for name, gradient in zip(names, found, strict=True):
        finite = gradient is None or gradient.isfinite().all()
        case.expect(finite, f"the gradient of {name} holds a number that is not finite")
    case.expect(found[0] is not None, "no gradient reaches the features")
    if case.head.fused:
        case.head.fused = False  # type: ignore[misc]  # for this one
        plain = torch.autograd.grad(loss(*inputs), inputs, allow_unused=True)
        for name, x, y in zip(names, found, plain, strict=True):
            if x is not None and y is not None:
                case.same(x, y, f"the gradients of {name} by the fast form and by terms() differ")
    if case.head.stops_gradient:
        return
    try:
        torch.autograd.gradcheck(loss, inputs, atol=1e-5, rtol=1e-3)
    except RuntimeError as error:
        numbers = re.search(r"with respect to input (\d+)", str(error))
        where = f"the gradient of {names[int(numbers[1])]}" if numbers else str(error).splitlines()[0]
        message = f"{where} is not that of the loss by finite differences; where it is meant to be stopped, set "
        raise HeadError(f"{case.cls.__name__}: {message}stops_gradient = True on the class") from error


def _dtypes(case: _Case) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        head = case.twin(dtype)
        features = case.features.to(dtype)
        noise = None if case.noise is None else case.noise.float()
        loss = head.loss(features, case.target, noise=noise).total
        case.expect(loss.isfinite(), f"the loss of {dtype} features is {loss.item()}")
        case.expect(loss.dtype == torch.float32, f"the loss of {dtype} features must be float32, got {loss.dtype}")
        loss.backward()  # type: ignore[no-untyped-call]
        probs = head.predict_proba(features)
        case.expect(
            probs.dtype == torch.float32, f"probabilities of {dtype} features must be float32, not {probs.dtype}"
        )
        expected = case.head.loss(case.features, case.target, noise=case.noise).total.item()
        slack = 0.1 if dtype != torch.float32 else 1e-4
        case.expect(
            abs(loss.item() - expected) <= slack * max(1.0, abs(expected)),
            f"the loss of {dtype} features is {loss.item():.5g}, that of float64 {expected:.5g}",
        )


def _empty(case: _Case) -> None:
    features, target = case.features[:0].requires_grad_(), case.target[:0]
    loss = case.head.loss(features, target).total
    case.expect(loss == 0, f"the loss of an empty batch must be 0, got {loss.item()}")
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in case.head.parameters() if p.grad is not None]
    case.expect(not any(bool(grad.any()) for grad in gradients), "the loss of an empty batch has a gradient")
    for mode in MODES:
        shape = tuple(case.head.predict_proba(features, mode).shape)
        case.expect(shape == (0, _CLASSES), f"probabilities of no rows must have shape (0, {_CLASSES}), got {shape}")


def _ignored(case: _Case) -> None:
    head = case.twin().train()  # also where it keeps state: ignored rows leave no trace
    target = case.target.clone()
    target[1::2] = head.ignore_index
    rows = case.rows(head, target)
    case.expect((rows[1::2] == 0).all(), "rows with the label ignore_index have a loss other than 0")
    state = {name: value.clone() for name, value in head.state_dict().items()}
    twin = case.twin().train()
    noise = None if case.noise is None else case.noise[..., ::2, :]
    alone = twin.loss(case.features[::2], case.target[::2], reduction="none", noise=noise).total
    case.same(rows[::2], alone, "rows with the label ignore_index change the losses of the others")
    for name, value in twin.state_dict().items():
        case.same(value, state[name], f"rows with the label ignore_index change {name}")
    found = head.eval().loss(case.features, torch.full_like(target, head.ignore_index), noise=case.noise).total
    case.expect(found == 0, f"the loss of ignored rows alone must be 0, got {found.item()}")


def _class_weight(case: _Case) -> None:
    weight = torch.arange(1, _CLASSES + 1, dtype=F64) / 4
    head = case.twin(class_weight=weight.tolist())
    if not head.label_smoothing:  # else the weights of the other classes take part
        expected = case.rows() * weight[case.target]
        case.same(case.rows(head), expected, "class_weight must multiply the loss of a row (see class_weighted)")
    found = head.loss(case.features, case.target, noise=case.noise).total
    expected = case.rows(head).sum() / weight[case.target].sum()
    case.same(found, expected, "with class_weight, the mean must be weighted")


def _permutation(case: _Case) -> None:
    """What the classes are called must not matter: every dimension of size K is permuted."""
    order = torch.randperm(_CLASSES)
    other = case.make()
    state = {}
    for name, value in case.head.state_dict().items():
        for dim in [dim for dim, size in enumerate(value.shape) if size == _CLASSES]:
            value = value.index_select(dim, order)
        state[name] = value
    other.load_state_dict(state)
    noise = None if case.noise is None else case.noise[..., order]
    message = "the loss changes if the classes are numbered differently"
    case.same(case.rows(other, order.argsort()[case.target], noise), case.rows(), message)
    expected = case.head.predict_proba(case.features)[:, order]
    message = "probabilities change if the classes are numbered differently"
    case.same(other.predict_proba(case.features), expected, message)


def _predictions(case: _Case) -> None:
    logits = case.head(case.features)
    case.expect(logits.shape == (_ROWS, _CLASSES), f"forward() must return (N, K) logits, got {tuple(logits.shape)}")
    mean = case.head.predict_proba(case.features)
    case.expect(
        (logits.argmax(-1) == mean.argmax(-1)).all(), "forward() and predict_proba() disagree on the best class"
    )
    for mode in MODES:
        p = case.head.predict_proba(case.features, mode, samples=10)
        case.probabilities(p, f"predict_proba({mode!r})")
        case.same(p.sum(-1), torch.ones(_ROWS, dtype=F64), f"rows of predict_proba({mode!r}) do not sum to 1")
        if not case.head.masked:
            case.same(p, mean, f"{mode!r} differs from 'mean', though the head says that it draws no masks (masked)")
    more = case.features.reshape(2, 3, _FEATURES)
    case.same(case.head(more).reshape(_ROWS, _CLASSES), logits, "features of another batch shape have other logits")


def _top(case: _Case) -> None:
    expected = case.head.predict_proba(case.features).topk(3).values
    case.same(case.head.topk(case.features, 3).values, expected, "topk() differs from predict_proba()")
    if case.head.separable:
        maps = case.head.prediction_maps(case.features)
        whole, message = case.head.prediction_logits(maps), "separable is not true: "
        some = case.head.prediction_logits({name: x[..., :3] for name, x in maps.items()})
        case.same(some, whole[..., :3], f"{message}the prediction logits of some classes depend on the others")
        expected = case.head.predict_proba(case.features)
        case.same(whole.softmax(-1), expected, f"{message}the probabilities are not the softmax of prediction_logits()")


def _masks(case: _Case) -> None:
    case.probabilities(case.head.retain_probs(case.features), "retain_probs()")
    case.probabilities(case.head.posterior_probs(case.features, case.target), "posterior_probs()")
    std = case.head.predictive_std(case.features)
    case.expect(std.isfinite().all() and (std >= 0).all(), "predictive_std() holds numbers that are not deviations")


def _state(case: _Case) -> None:
    case.head.train().loss(case.features, case.target, noise=case.noise)
    case.head.eval()
    message = "state_dict() does not hold everything: a head that loads it has another loss"
    case.same(case.rows(case.twin()), case.rows(), message)


def _config(case: _Case) -> None:
    config = case.head.config()
    try:
        twin = make_head(**config, dtype=F64).eval()
    except (InvalidType, InvalidValue):  # a class that no other process could import, and that is not registered
        twin = case.cls(**{key: value for key, value in config.items() if key != "name"}, dtype=F64).eval()
    case.expect(type(twin) is case.cls, f"config() names {config['name']!r}, which makes a {type(twin).__name__}")
    case.expect(twin.config() == config, f"a head made from config() has another: {twin.config()} and {config}")
    twin.load_state_dict(case.head.state_dict())
    case.same(case.rows(twin), case.rows(), "a head made from config() and state_dict() has another loss")


def _packing(case: _Case) -> None:
    packed = PackedHead(case.head)
    criterion = DropMaxLoss(packed)
    expected = case.head.eval().loss(case.features, case.target, noise=case.noise).total
    found = criterion(packed.train()(case.features), case.target, noise=case.noise)
    message = "the packed loss differs from loss(): set packable = False if it needs more than logits()"
    case.same(found, expected, message)
    message = "the logits of a packed output differ from forward()"
    case.same(criterion.logits(packed(case.features)), packed.eval()(case.features), message)


def _compiled(case: _Case) -> None:
    torch._dynamo.reset()

    def step(features: Tensor, target: Tensor, noise: Tensor | None) -> tuple[Tensor, Tensor]:
        return case.head.loss(features, target, noise=noise).total, case.head.predict_proba(features)

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(case.features, case.target, case.noise)
    for what, x, y in zip(("loss", "prediction"), found, step(case.features, case.target, case.noise), strict=True):
        case.same(x, y, f"the compiled {what} differs")
