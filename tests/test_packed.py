"""The packed head and its criterion are the head and its loss, to the last digit, in loops that know neither."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropmax import HEADS, DropMax, DropMaxError, DropMaxQP, Softmax, make_head, replace_head
from dropmax.heads.base import Head, Loss
from dropmax.packed import DropMaxLoss, PackedHead, features_of
from tests.close import close

F64 = torch.float64
D, K = 6, 5
WEIGHT = [1.0, 2.0, 0.5, 1.0, 3.0]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in HEADS),
    *((name, {"class_weight": WEIGHT, "label_smoothing": 0.1}) for name in HEADS),
    ("dropmax-qp", {"gamma": 0.1, "samples": 3}),
    ("dropmax", {"samples": 3, "temperature": 0.5}),
    ("dropmax", {"likelihood": "exact"}),
    ("dropmax", {"likelihood": "marginal", "class_weight": WEIGHT}),
    ("dropmax", {"likelihood": "exact", "stop_gradient": "parameters", "class_weight": WEIGHT}),
    ("dropmax", {"stop_gradient": "parameters", "samples": 2}),
    ("dropmax", {"stop_gradient": "parameters", "mask_gradient": True, "rank": 3}),
    ("dropmax", {"likelihood": "exact", "rank": 2}),
    ("dropmax", {"stop_gradient": "parameters", "mask_gradient": False}),
    ("dropmax-softmax-retain", {}),
    ("dropmax", {"prior_correction": True, "cross_entropy_weight": 2.0, "kl_weight": 0.3, "auxiliary_weight": 5.0}),
]
WIDTHS = {"dropmax": 3 * K + 1, "softmax": K, "sparsemax": K, "sampled-softmax": K + 1, "random-dropmax": K + 1}


def labels(*shape: int) -> Tensor:
    target = torch.randint(K, shape)
    target.view(-1)[1] = -100
    return target


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_loss_and_gradients_are_those_of_the_head(name: str, options: dict[str, Any], reduction: str) -> None:
    head = make_head(name, D, K, dtype=F64, **options)
    packed = PackedHead(head)
    criterion = DropMaxLoss(packed, reduction=reduction)
    features = torch.randn(2, 4, D, dtype=F64, requires_grad=True)
    target = labels(2, 4)
    shape = head.noise_shape(8)
    noise = None if shape is None else torch.rand(*shape[:-2], 2, 4, K, dtype=F64)

    expected = head.loss(features, target, reduction=reduction, noise=noise)
    found = criterion.terms(packed(features), target, noise=noise)
    close(criterion(packed(features), target, noise=noise), found.total, terms=8 * K)
    for name, value in {**expected.terms, "total": expected.total}.items():
        close({**found.terms, "total": found.total}[name], value, terms=8 * K, scale=10.0, what=name)
    leaves = ["features", *dict(head.named_parameters())]
    for where, x, y in zip(leaves, gradients(found, head, features), gradients(expected, head, features), strict=True):
        assert (x is None) == (y is None), where
        if x is not None:
            close(x, y, terms=8 * K, scale=max(1.0, float(y.abs().max())), what=where)


def gradients(loss: Loss, head: Head, features: Tensor) -> list[Tensor | None]:
    """Weigh the rows unequally, so that a loss of a wrong row would show."""
    weights = torch.arange(1, loss.total.numel() + 1, dtype=F64).reshape(loss.total.shape)
    return list(torch.autograd.grad((loss.total * weights).sum(), [features, *head.parameters()], allow_unused=True))


@pytest.mark.parametrize("name", HEADS)
def test_widths_in_the_two_modes_and_another_criterion_is_nan_at_the_first_step(name: str) -> None:
    """It would otherwise train 3 K classes in silence."""
    packed = PackedHead(make_head(name, D, K))
    features, width = torch.randn(7, D), WIDTHS.get(name, 2 * K + 1)
    assert packed(features).shape == (7, width)
    assert packed.in_features == D
    assert nn.CrossEntropyLoss()(packed(features), torch.randint(K, (7,))).isnan() == (width != K)
    close(packed.eval()(features), packed.head(features), terms=D)
    assert packed(features).shape == (7, K)


@pytest.mark.parametrize("name", HEADS)
def test_soft_labels_give_the_same_loss_packed(name: str) -> None:
    packed = PackedHead(make_head(name, D, K, dtype=F64))
    features, soft = torch.randn(4, D, dtype=F64), torch.rand(4, K, dtype=F64).softmax(-1)
    shape = packed.head.noise_shape(4)
    noise = None if shape is None else torch.rand(*shape, dtype=F64)
    expected = packed.head.loss(features, soft, noise=noise)
    close(DropMaxLoss(packed)(packed(features), soft, noise=noise), expected.total, terms=4 * K * K, scale=10.0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["sigsoftmax", *(name for name in HEADS if name != "sparsemax")])
@pytest.mark.parametrize("options", [{}, {"class_weight": WEIGHT, "label_smoothing": 0.1, "ignore_index": -1}])
def test_in_evaluation_mode_it_is_the_cross_entropy_of_torch(
    name: str, reduction: str, options: dict[str, Any]
) -> None:
    head = make_head(name, D, K, dtype=F64, **options)
    packed = PackedHead(head).eval()
    if name == "dropmax":
        head.cross_entropy_weight = 7.0  # of the objective, which this is not
    logits, target = packed(torch.randn(9, D, dtype=F64)), torch.randint(K, (9,))
    target[3] = head.ignore_index
    state = torch.get_rng_state()
    criterion = DropMaxLoss(packed, reduction=reduction)
    found = criterion(logits, target)
    assert torch.equal(criterion.logits(logits), logits)
    assert torch.equal(torch.get_rng_state(), state), "validating must not change the noise of training"
    expected = F.cross_entropy(
        logits,
        target,
        weight=torch.tensor(WEIGHT, dtype=F64) if options else None,
        ignore_index=head.ignore_index,
        label_smoothing=head.label_smoothing,
        reduction=reduction,
    )
    close(found, expected, terms=9 * K)


def test_a_batch_without_a_label_that_counts_has_loss_zero() -> None:
    packed = PackedHead(DropMax(D, K))
    criterion, nothing = DropMaxLoss(packed), torch.full((3,), -100)
    assert criterion(packed(torch.randn(3, D)), nothing) == 0
    assert criterion(packed.eval()(torch.randn(3, D)), nothing) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in HEADS), ("dropmax", {"stop_gradient": "parameters"})]
)
def test_under_autocast_it_is_the_head_under_autocast(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    packed = PackedHead(make_head(name, D, K, **options))
    criterion = DropMaxLoss(packed)
    features, target, noise = torch.randn(8, D), labels(8), torch.rand(8, K)
    with torch.autocast("cpu", dtype=dtype):
        output = packed(features)
        expected = packed.head.loss(features, target, noise=noise).total
        found = criterion(output, target, noise=noise)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)
    # Some loops leave autocast, or widen the output, before they compute the loss.
    torch.testing.assert_close(criterion(output.float(), target, noise=noise), expected)
    found.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in packed.parameters())


@pytest.mark.parametrize("name", ["softmax", "random-dropmax", "deterministic-dropmax", "dropmax-qp", "dropmax"])
def test_a_training_step_compiles_without_a_graph_break(name: str) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, D), nn.ReLU(), PackedHead(make_head(name, D, K)))
    criterion = DropMaxLoss(model)
    x, target, noise = torch.randn(8, 3), labels(8), torch.rand(8, K)

    def step(x: Tensor, target: Tensor) -> Tensor:
        return criterion(model(x), target, noise=noise)

    expected = step(x, target)
    gradient = torch.autograd.grad(expected, list(model.parameters()))
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(x, target)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, list(model.parameters())), gradient)
    # The usual way to say it: a compiled model, a criterion made from it or before it, both modes.
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(DropMaxLoss(compiled)(compiled(x), target, noise=noise), expected)
    compiled.eval()
    torch.testing.assert_close(compiled(x), model(x))
    assert compiled(x).shape == (8, K)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
def test_distributed_data_parallel_sees_every_parameter_used(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, D), nn.ReLU(), PackedHead(DropMax(D, K)))
    x, target, noise = torch.randn(8, 3), labels(8), torch.rand(8, K)
    expected = torch.autograd.grad(DropMaxLoss(model)(model(x), target, noise=noise), list(model.parameters()))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        criterion = DropMaxLoss(parallel)
        for _ in range(2):  # what a first step left unused, the second complains about
            parallel.zero_grad()
            criterion(parallel(x), target, noise=noise).backward()
    finally:
        torch.distributed.destroy_process_group()
    torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))


def test_a_state_dict_goes_round_and_holds_nothing_but_the_head() -> None:
    model = nn.Sequential(nn.Linear(3, D), PackedHead(DropMax(D, K, class_weight=WEIGHT)))
    other = nn.Sequential(nn.Linear(3, D), PackedHead(DropMax(D, K, class_weight=WEIGHT)))
    state = model.state_dict()
    assert set(state) == {"0.weight", "0.bias", *(f"1.head.{name}" for name in model[1].head.state_dict())}
    other.load_state_dict(state)
    x = torch.randn(2, 3)
    close(model(x), other(x), terms=D)
    plain = DropMax(D, K)
    plain.load_state_dict({name.removeprefix("1.head."): v for name, v in state.items() if name.startswith("1.")})


def test_the_criterion_has_no_parameters_of_its_own_and_follows_the_options_of_the_head() -> None:
    packed = PackedHead(DropMax(D, K))
    criterion = DropMaxLoss(packed)
    assert not list(criterion.parameters())
    assert not criterion.state_dict()
    features, target, noise = torch.randn(8, D), labels(8), torch.rand(8, K)
    before = criterion(packed(features), target, noise=noise)
    packed.head.kl_weight = 2.0
    after = criterion(packed(features), target, noise=noise)
    assert before != after
    close(after, packed.head.loss(features, target, noise=noise).total, terms=8 * K, scale=10.0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_of_model_and_criterion_belong_together(duplicate: Any) -> None:
    packed = PackedHead(DropMax(D, K, class_weight=WEIGHT))
    twin, criterion = duplicate((packed, DropMaxLoss(packed)))
    assert criterion.head is twin.head
    assert criterion.head is not packed.head
    alone = duplicate(DropMaxLoss(packed))  # and a copy of the criterion alone works as well
    features, target, noise = torch.randn(8, D), labels(8), torch.rand(8, K)
    expected = packed.head.loss(features, target, noise=noise).total
    for found in (criterion(twin(features), target, noise=noise), alone(packed(features), target, noise=noise)):
        close(found, expected, terms=8 * K, scale=10.0)  # the terms cancel: kl - entropy


def test_repr_shows_the_options() -> None:
    packed = PackedHead(DropMax(D, K, samples=2))
    shown = "DropMax(in_features=6, num_classes=5, samples=2)"
    assert repr(packed) == f"PackedHead(\n  (head): {shown}\n)"
    assert repr(DropMaxLoss(packed, reduction="sum")) == f"DropMaxLoss({shown}, reduction='sum')"


# --- Hugging Face's Trainer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda logits: SimpleNamespace(logits=logits), lambda logits: {"logits": logits}])
def test_accumulated_batches_add_up_to_the_mean_over_all_labels(wrap: Any) -> None:
    packed = PackedHead(DropMax(D, K, likelihood="exact", dtype=F64))
    criterion = DropMaxLoss(packed)
    features, target = torch.randn(6, 3, D, dtype=F64), labels(6, 3)
    target[0] = -100  # so that the two halves do not count alike
    whole = criterion.compute_loss_func(wrap(packed(features)), target)
    torch.testing.assert_close(whole, packed.head.loss(features, target).total)
    items = (target != -100).sum()
    halves = [
        criterion.compute_loss_func(wrap(packed(features[rows])), target[rows], num_items_in_batch=items)
        for rows in (slice(0, 2), slice(2, 6))
    ]
    torch.testing.assert_close(halves[0] + halves[1], whole)


# --- models of other people --------------------------------------------------------------------------------------


class Foreign(nn.Module):
    """A model of somebody else's; its layer is called in the middle, and the output is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.fc = nn.Linear(16, K)

    def forward(self, x: Tensor, scale: float = 1.0) -> SimpleNamespace:
        return SimpleNamespace(logits=self.fc(scale * self.body(x).relu()))


def test_replace_head_packed_returns_the_model_itself_with_its_trained_logits() -> None:
    model = Foreign().eval().double()
    x = torch.randn(3, 8, dtype=F64)
    before = model(x).logits
    same = replace_head(model, "dropmax", packed=True, temperature=0.3)
    assert same is model
    assert isinstance(model.fc, PackedHead)
    assert not model.fc.training, "a model in evaluation mode stays in evaluation mode"
    assert repr(model.fc.head) == "DropMax(in_features=16, num_classes=5, temperature=0.3)"
    torch.testing.assert_close(model.fc.head.classifier(features_of(model, x)), before)
    model.train()
    assert model(x).logits.shape == (3, 3 * K + 1)
    DropMaxLoss(model)(model(x).logits, torch.tensor([0, 1, 2])).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_features_of_passes_everything_on_and_leaves_no_hook() -> None:
    model = replace_head(Foreign(), packed=True).eval()
    x = torch.randn(3, 8)
    torch.testing.assert_close(features_of(model, x, scale=2.0), 2 * model.body(x).relu())
    assert not model.fc._forward_pre_hooks
    with pytest.raises(RuntimeError):
        features_of(model, torch.randn(3, 7))
    assert not model.fc._forward_pre_hooks


def test_features_of_a_model_that_goes_round_its_head() -> None:
    class Skips(Foreign):
        def forward(self, x: Tensor, scale: float = 1.0) -> SimpleNamespace:
            return SimpleNamespace(logits=self.body(x))

    with pytest.raises(DropMaxError, match="Skips never called its packed head"):
        features_of(replace_head(Skips(), packed=True), torch.randn(3, 8))


def test_a_packed_head_is_replaced_by_another_and_keeps_its_class_logits() -> None:
    model = replace_head(Foreign(), packed=True)
    before = model.fc.head.classifier.weight.clone()
    assert replace_head(model, "softmax", packed=True) is model
    assert model.fc.head.name == "softmax"
    assert torch.equal(model.fc.head.classifier.weight, before)
    message = r"Foreign ends in a dropmax head already: 'fc\.head\.classifier' is part of Softmax\("
    with pytest.raises(DropMaxError, match=message):
        replace_head(model, name="fc.head.classifier", packed=True)


# --- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, 2 * K), r"has shape \(4, 10\), but the last dimension must be 16, what PackedHead\('dropmax'\) returns"),
        ((4, K + 1), r"in training mode, or 5, the logits of evaluation mode$"),
        ((4, 3 * K + 1, 7), r"classes are the last dimension here: pass output\.movedim\(1, -1\)"),
        ((4, K, 7), r"classes are the last dimension here: pass output\.movedim\(1, -1\)"),
        ((), r"has shape \(\)"),
    ],
)
def test_wrong_widths(shape: tuple[int, ...], message: str) -> None:
    criterion = DropMaxLoss(DropMax(D, K))
    with pytest.raises(DropMaxError, match=message):
        criterion(torch.zeros(shape), torch.zeros(4, dtype=torch.long))
    with pytest.raises(DropMaxError, match=message):
        criterion.logits(torch.zeros(shape))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PackedHead(nn.Linear(3, 3)), r"must be a dropmax head, got Linear: make one with make_head"),
        (lambda: DropMaxLoss(10), r"takes a packed head or a model that holds one, got 10"),
        (lambda: DropMaxLoss(nn.Linear(3, 3)), r"Linear holds no packed head: put one in with replace_head"),
        (lambda: PackedHead(DropMax(D, K, chunk_classes=2)), "chunk_classes=2 never holds the logits of all classes"),
        (
            lambda: DropMaxLoss(nn.Sequential(PackedHead(DropMax(K, K)), PackedHead(DropMaxQP(K, K)))),
            r"Sequential holds 2 packed heads: pass the one",
        ),
        (lambda: DropMaxLoss(DropMax(D, K), reduction="avg"), r"unknown reduction 'avg'"),
        (lambda: PackedHead(DropMax(D, K))(torch.randn(2, D + 1)), r"features have shape \(2, 7\)"),
        (lambda: DropMaxLoss(DropMax(D, K))(SimpleNamespace(), None), r"must be a torch\.Tensor, got SimpleNamespace"),
        (lambda: DropMaxLoss(Softmax(D, K))(torch.zeros(2, K), torch.zeros(2, K)), r"probabilities that sum to 1"),
        (lambda: DropMaxLoss(Softmax(D, K))(torch.zeros(2, K), torch.zeros(3).long()), r"target has shape \(3,\)"),
        (lambda: DropMaxLoss(Softmax(D, K))(torch.zeros(2, K), torch.tensor([0, 9])), r"holds the label 9"),
        (lambda: replace_head(Foreign(), packed="yes"), r"packed must be True or False, got 'yes'"),  # type: ignore[call-overload]
    ],
)
def test_mistakes_are_explained(call: Any, message: str) -> None:
    with pytest.raises(DropMaxError, match=message):
        call()


def test_a_head_with_a_loss_of_its_own_is_refused_and_not_ignored() -> None:
    class Penalised(DropMax):
        name = "penalised"

        def loss(self, features: Tensor, target: Tensor, **options: Any) -> Loss:  # type: ignore[override]
            total, terms = super().loss(features, target, **options)
            return Loss(total + 0.01 * features.square().mean(), terms)

    for use in (PackedHead, DropMaxLoss):
        with pytest.raises(DropMaxError, match=r"alone, so it cannot be packed: Penalised has a loss\(\) of"):
            use(Penalised(D, K))

    class Logged(DropMax):
        name = "logged"
        packable = True  # it changes no number

        def loss(self, features: Tensor, target: Tensor, **options: Any) -> Loss:  # type: ignore[override]
            return super().loss(features, target, **options)

    packed = PackedHead(Logged(D, K))
    features, target, noise = torch.randn(8, D), labels(8), torch.rand(8, K)
    found = DropMaxLoss(packed)(packed(features), target, noise=noise)
    torch.testing.assert_close(found, packed.head.loss(features, target, noise=noise).total)


@pytest.mark.parametrize("base", [DropMax, DropMaxQP, Softmax])
def test_a_head_with_terms_of_its_own_is_packed_with_them(base: type[Head]) -> None:
    class Doubled(base):  # type: ignore[misc, valid-type]
        name = "doubled"

        def terms(self, logits: Any, target: Tensor, noise: Any) -> dict[str, Tensor]:
            return {name: 2 * term for name, term in super().terms(logits, target, noise).items()}

    head, twin = Doubled(D, K, dtype=F64), base(D, K, dtype=F64)
    twin.load_state_dict(head.state_dict())
    packed = PackedHead(head)
    features, target, noise = torch.randn(8, D, dtype=F64), labels(8), torch.rand(8, K, dtype=F64)
    expected = 2 * twin.loss(features, target, noise=noise).total
    torch.testing.assert_close(head.loss(features, target, noise=noise).total, expected)
    torch.testing.assert_close(DropMaxLoss(packed)(packed(features), target, noise=noise), expected)
