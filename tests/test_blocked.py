"""The objective block by block against the plain equations: the same numbers, whatever the blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from dropmax import DropMax, blocked, make_head
from dropmax.blocked import RowTerms, Settings, blocked_terms, choose_block, plain_terms, walk
from dropmax.errors import InvalidType, InvalidValue
from dropmax.heads import dropmax as dropmax_head
from dropmax.noise import draw_seed, uniform

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def problem(
    rows: int, features: int, classes: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> tuple[Tensor, list[Tensor], Tensor]:
    h = torch.randn(rows, features, dtype=dtype, requires_grad=True)
    shapes = [(classes, features), (classes,)] * 3
    maps = [(scale * torch.randn(shape, dtype=dtype)).requires_grad_() for shape in shapes]
    return h, maps, torch.randint(classes, (rows,))


def assert_same(found: RowTerms, expected: RowTerms, inputs: list[Tensor], tolerance: float) -> None:
    """Compare values and gradients, each relative to the largest number of its kind."""
    weight = torch.rand(5, *expected.nll.shape, dtype=expected.nll.dtype)
    gradients = [
        torch.autograd.grad((torch.stack(list(terms)) * weight).sum(), inputs, allow_unused=True)
        for terms in (found, expected)
    ]
    for x, y in [*zip(found, expected, strict=True), *zip(*gradients, strict=True)]:
        if x is None or y is None:
            assert x is y
        else:
            x, y = x.detach(), y.detach()
            assert x.shape == y.shape
            assert x.dtype == y.dtype
            assert float((x - y).abs().max()) <= tolerance * (float(y.abs().max()) + 0.1)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("size", [3.0, 1e4, 1e30])
@pytest.mark.parametrize("block", [1, 2, 4])
def test_corrections_that_cancel_and_huge_logits(block: int, size: float, samples: int) -> None:
    # The bias holds the logits: equal and huge o, and b = a + r that is exactly 0 for one class.
    o = torch.tensor([size, size, size, -size])
    a, r = torch.tensor([0.0, size, -1e4, 1.0]), torch.tensor([0.0, -size, 1.0, size])
    maps = [x for logits in (o, a, r) for x in (torch.zeros(4, 1), logits)]
    maps = [x.requires_grad_() for x in maps]
    h, target, noise = torch.ones(2, 1), torch.tensor([0, 3]), torch.full((samples, 2, 4), 0.3).squeeze(0)
    settings = Settings(block, samples=samples, smooth=True)
    found, expected = (f(h, maps, target, noise, settings) for f in (blocked_terms, plain_terms))
    assert_same(found, expected, maps[1::2], 1e-5)
    assert found.nll[0].item() == pytest.approx(expected.nll[0].item(), rel=1e-5)  # as large as log 2, unlike the other
    assert found.nll[0].item() < 2


@given(
    rows=st.integers(1, 9),
    classes=st.integers(2, 40),
    block=st.integers(1, 45),
    keep=st.booleans(),
    samples=st.sampled_from([1, 3]),
    smooth=st.booleans(),
    weighted=st.booleans(),
    mask_gradient=st.booleans(),
    stop_parameters=st.booleans(),
    base_rate=st.sampled_from([0.0, 2.0]),
    temperature=st.sampled_from([0.1, 0.7]),
    epsilon=st.sampled_from([1e-20, 1e-3]),
    seeded=st.booleans(),
    double=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_blocks_give_what_the_plain_equations_give(
    rows: int,
    classes: int,
    block: int,
    samples: int,
    weighted: bool,
    seeded: bool,
    double: bool,
    seed: int,
    **options: Any,
) -> None:
    torch.manual_seed(seed)
    dtype = torch.float64 if double else torch.float32
    h, maps, target = problem(rows, 5, classes, dtype)
    settings = Settings(block, samples=samples, **options)
    noise = torch.rand((rows, classes) if samples == 1 else (samples, rows, classes), dtype=dtype)
    noise = draw_seed() if seeded else noise
    class_weight = torch.rand(classes, dtype=dtype) if weighted else None
    found = blocked_terms(h, maps, target, noise, settings, class_weight)
    expected = plain_terms(h, maps, target, noise, settings, class_weight)
    assert_same(found, expected, [h, *maps], TOLERANCE[dtype])


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_targets_in_every_block_and_on_every_edge(dtype: torch.dtype, keep: bool) -> None:
    h, maps, _ = problem(11, 4, 11, dtype)
    target, noise, settings = torch.arange(11), torch.rand(11, 11, dtype=dtype), Settings(3, keep)
    expected = plain_terms(h, maps, target, noise, settings)
    assert_same(blocked_terms(h, maps, target, noise, settings), expected, [h, *maps], TOLERANCE[dtype])


@pytest.mark.parametrize("group", [1, 12, 50])
@pytest.mark.parametrize("options", [{}, {"keep": True}, {"samples": 2, "smooth": True, "stop_parameters": True}])
def test_rows_in_groups_of_any_size(options: dict[str, Any], group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "GROUP_NUMBERS", group)
    h, maps, target = problem(7, 4, 11, torch.float64)
    settings = Settings(4, **options)
    expected = plain_terms(h, maps, target, seed := draw_seed(), settings)
    assert_same(blocked_terms(h, maps, target, seed, settings), expected, [h, *maps], 1e-10)


@pytest.mark.parametrize("scale", [1e-3, 5.0, 30.0])
def test_small_and_large_logits_keep_their_digits(scale: float) -> None:
    h, maps, target = problem(6, 8, 50, scale=scale)
    noise, settings = torch.rand(6, 50), Settings(16)
    found = blocked_terms(h, maps, target, noise, settings)
    wide = plain_terms(h.double(), [x.double() for x in maps], target, noise.double(), settings)
    for x, y in zip(found, wide, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=2e-5)


def test_many_classes_that_are_all_but_certain_keep_their_small_terms() -> None:
    # 1 + exp(-14) has one digit of exp(-14) left in float32: a plain logarithm would be off by per cents.
    classes, zero = 4000, torch.zeros(4000, 1)
    maps = [zero, zero[:, 0], zero, torch.full((classes,), -14.2), zero, torch.full((classes,), -0.3)]
    arguments = (torch.tensor([0]), torch.full((1, classes), 0.5), Settings(512))
    found = blocked_terms(torch.ones(1, 1), maps, *arguments)
    wide = plain_terms(torch.ones(1, 1).double(), [x.double() for x in maps], *arguments)
    assert float(found.entropy) == pytest.approx(float(wide.entropy), rel=1e-5)
    assert float(found.kl) == pytest.approx(float(wide.kl), rel=1e-5)


def test_second_derivatives_are_those_of_the_plain_equations() -> None:
    h, maps, target = problem(3, 4, 7, torch.float64)
    noise, settings = torch.rand(3, 7, dtype=torch.float64), Settings(3)

    def penalty(function: Any) -> tuple[Tensor, ...]:
        total = sum(term.sum() for term in function(h, maps, target, noise, settings))
        (slope,) = torch.autograd.grad(total, h, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [h, *maps], allow_unused=True)

    for x, y in zip(penalty(blocked_terms), penalty(plain_terms), strict=True):
        torch.testing.assert_close(x, y)


def test_frozen_maps_get_no_gradient() -> None:
    h, maps, target = problem(3, 4, 7)
    maps[2].requires_grad_(False)
    h.requires_grad_(False)
    sum(term.sum() for term in blocked_terms(h, maps, target, draw_seed(), Settings(3))).backward()  # type: ignore[union-attr]
    assert [x.grad is None for x in (h, *maps)] == [True, False, False, True, False, False, False]


def test_blocks_are_even_and_no_wider_than_asked() -> None:
    assert choose_block(128, 10) == 10
    for rows, classes in ((64, 1_000_000), (256, 100_000), (8192, 128_000), (1, 5000)):
        block = choose_block(rows, classes)
        assert block <= max(256, 2**19 // rows) + 64
        assert math.ceil(classes / block) * block - classes < 64 * math.ceil(classes / block)


# --- noise ------------------------------------------------------------------------------------------------------------


def test_noise_is_uniform_and_its_neighbours_are_independent() -> None:
    u = uniform(draw_seed(), 400, 0, 3000)
    assert 0 < float(u.min()) < 1e-4
    assert 1 - 1e-4 < float(u.max()) < 1
    assert stats.kstest(u.flatten().double().numpy(), "uniform").pvalue > 1e-3
    centred = (u - 0.5) * math.sqrt(12)
    size = math.sqrt(u.numel())
    for down, right in ((0, 1), (1, 0), (1, 1), (0, 2), (5, 7)):
        pairs = centred[: 400 - down, : 3000 - right] * centred[down:, right:]
        assert abs(float(pairs.mean())) * size < 4
    # Rows and classes start from sums of two hashes, so corners of rectangles are where a weak mix would show.
    corners = centred[:-1, :-1] * centred[1:, 1:] * centred[:-1, 1:] * centred[1:, :-1]
    assert abs(float(corners.mean())) * size < 4
    bits = (u[::2, ::2] > 0.5) * 8 + (u[1::2, ::2] > 0.5) * 4 + (u[::2, 1::2] > 0.5) * 2 + (u[1::2, 1::2] > 0.5)
    assert stats.chisquare(torch.bincount(bits.flatten(), minlength=16).numpy()).pvalue > 1e-3


def test_seeds_differ_and_follow_the_global_generator() -> None:
    torch.manual_seed(5)
    first, second = (uniform(draw_seed(), 50, 0, 60) for _ in range(2))
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 0.08
    torch.manual_seed(5)
    assert torch.equal(first, uniform(draw_seed(), 50, 0, 60))


# --- the head ---------------------------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"prior_correction": True, "mask_gradient": False, "kl_weight": 0.3, "entropy_weight": 2.0},
    {"stop_gradient": "parameters", "temperature": 0.5, "samples": 2},
    {"label_smoothing": 0.2, "class_weight": torch.arange(1.0, 24.0).tolist(), "ignore_index": 3},
    {"class_weight": torch.arange(1.0, 24.0).tolist()},
]


def pair(options: dict[str, Any], chunk: int = 5, **more: Any) -> tuple[DropMax, DropMax]:
    heads = [DropMax(6, 23, chunk_classes=size, **options, **more) for size in (chunk, 0)]
    heads[1].load_state_dict(heads[0].state_dict())
    return heads[0], heads[1]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_chunked_head_has_the_same_loss_and_gradients(options: dict[str, Any], reduction: str) -> None:
    chunked, whole = pair(options, dtype=torch.float64)
    features, target = torch.randn(3, 4, 6, dtype=torch.float64), torch.randint(23, (3, 4))
    samples = options.get("samples", 1)
    noise = torch.rand((3, 4, 23) if samples == 1 else (samples, 3, 4, 23), dtype=torch.float64)
    results = []
    for head in (chunked, whole):
        h = features.clone().requires_grad_()
        loss = head.loss(h, target, noise=noise, reduction=reduction)
        loss.total.sum().backward()
        results.append([loss.total, *loss.terms.values(), h.grad, *(p.grad for p in head.parameters())])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_the_seed_decides_and_the_blocks_do_not() -> None:
    heads = [DropMax(6, 23, chunk_classes=size) for size in (4, 10, 23, 1000)]
    features, target = torch.randn(7, 6), torch.randint(23, (7,))
    losses = []
    for head in heads:
        head.load_state_dict(heads[0].state_dict())
        torch.manual_seed(3)
        losses.append(head.loss(features, target).total.item())
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-5)  # the terms are larger than their sum
    assert float(heads[0].loss(features, target).total) != pytest.approx(losses[0], rel=1e-6)


def test_large_logits_are_chunked_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(dropmax_head, "WHOLE_BYTES", 3 * 4 * 10 * 23)
    monkeypatch.setattr(dropmax_head, "blocked_terms", lambda *a: calls.append(len(a[0])) or blocked.blocked_terms(*a))
    by_itself, never = DropMax(6, 23), DropMax(6, 23, chunk_classes=0)
    for rows in (10, 11):
        for head in (by_itself, never):
            head.loss(torch.randn(rows, 6), torch.zeros(rows, dtype=torch.long)).total.backward()
    assert calls == [11]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_accumulate_in_float32(dtype: torch.dtype) -> None:
    chunked, whole = pair({}, dtype=dtype)
    features, target, noise = torch.randn(7, 6).to(dtype), torch.randint(23, (7,)), torch.rand(7, 23)
    for head in (chunked, whole):
        head.loss(features, target, noise=noise).total.backward()
    found, expected = (head.loss(features, target, noise=noise) for head in (chunked, whole))
    assert found.total.dtype == torch.float32
    torch.testing.assert_close(found.total, expected.total, rtol=1e-2, atol=1e-2)
    for x, y in zip(chunked.parameters(), whole.parameters(), strict=True):
        assert x.grad is not None
        assert x.grad.dtype == dtype
        torch.testing.assert_close(x.grad, y.grad, rtol=0.1, atol=0.02)


def test_autocast_is_followed() -> None:
    chunked, whole = pair({})
    features, target, noise = torch.randn(7, 6), torch.randint(23, (7,)), torch.rand(7, 23)
    results = []
    for head in (chunked, whole):
        h = features.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = head.loss(h, target, noise=noise).total
        loss.backward()
        results.append([loss, h.grad, *(p.grad for p in head.parameters())])
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-3, atol=1e-3)
    assert not torch.equal(results[0][0], chunked.loss(features, target, noise=noise).total)  # bfloat16 was used
    for x, y in zip(*(result[1:] for result in results), strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x, y, rtol=0.05, atol=0.01)


def test_no_rows_and_no_rows_that_count() -> None:
    head = DropMax(6, 23, chunk_classes=5)
    head.loss(torch.randn(0, 6), torch.zeros(0, dtype=torch.long)).total.backward()
    loss = head.loss(torch.randn(2, 6), torch.full((2,), -100))
    loss.total.backward()
    assert float(loss.total) == 0
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())


def test_transforms_and_foreign_layers_take_the_plain_way() -> None:
    head = DropMax(6, 23, chunk_classes=5)
    features, target, noise = torch.randn(4, 6), torch.randint(23, (4,)), torch.rand(4, 23)

    def loss(weights: dict[str, Tensor], h: Tensor) -> Tensor:
        class Objective(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.head = head

            def forward(self, h: Tensor) -> Tensor:
                return self.head.loss(h, target, noise=noise).total

        return torch.func.functional_call(Objective(), weights, (h,))

    weights = {f"head.{k}": v.detach() for k, v in head.named_parameters()}
    by_transform = torch.func.grad(loss)(weights, features)
    head.loss(features, target, noise=noise).total.backward()
    for name, p in head.named_parameters():
        torch.testing.assert_close(by_transform[f"head.{name}"], p.grad)
    head.retain = nn.Sequential(nn.Linear(6, 23))  # type: ignore[assignment]
    assert head.loss(features, target).total.isfinite()


def test_a_compiled_step_uses_the_blocks_without_a_graph_break() -> None:
    torch._dynamo.reset()
    head = DropMax(6, 12, chunk_classes=4)
    features, target, noise = torch.randn(5, 6, requires_grad=True), torch.randint(12, (5,)), torch.rand(5, 12)

    def loss(features: Tensor) -> Tensor:
        return head.loss(features, target, noise=noise).total

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "fused", lambda function: function)  # generating code takes most of a minute
        results = [torch.autograd.grad(f(features), [features, *head.parameters()]) for f in (loss, compiled)]
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"likelihood": "exact"}, "chunk_classes=8 is not possible: likelihood='exact' integrates"),
        ({"likelihood": "marginal"}, "likelihood='marginal' integrates over the masks of all classes together"),
        ({"epsilon": 1e-35}, "epsilon=1e-35 would underflow, use at least 1e-30"),
        ({"chunk_classes": -1}, "chunk_classes must be at least 0, got -1"),
        ({"name": "dropmax-unmasked"}, "the loss of 'dropmax-unmasked' has no blocked form"),
        ({"name": "dropmax-softmax-retain"}, "the loss of 'dropmax-softmax-retain' has no blocked form"),
    ],
)
def test_what_cannot_be_chunked_says_so(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        make_head(**{"name": "dropmax", "in_features": 4, "num_classes": 9, "chunk_classes": 8, **options})


def test_chunk_classes_is_a_whole_number() -> None:
    with pytest.raises(InvalidType, match=r"chunk_classes must be a whole number, got 2\.5"):
        DropMax(4, 9, chunk_classes=2.5)  # type: ignore[arg-type]
    assert DropMax(4, 9, chunk_classes=3).config()["chunk_classes"] == 3
