"""The walk over blocks of classes against the plain equations: the same numbers, whatever the blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from dropmax import DropMax, make_head, objective, walk
from dropmax.errors import InvalidType, InvalidValue
from dropmax.heads import dropmax as dropmax_head
from dropmax.losses import all_noise, losses
from dropmax.noise import draw_words, uniform
from dropmax.objective import Options
from dropmax.walk import Maps, Rows, choose_block
from tests.heads.losses import loss_at

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def problem(
    rows: int, features: int, classes: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, rank: int = 0
) -> tuple[Maps, Tensor]:
    h = torch.randn(rows, features, dtype=dtype, requires_grad=True)
    parts: list[Tensor] = []
    for i in range(3):
        inputs = h if i == 0 or not rank else torch.randn(rows, rank, dtype=dtype, requires_grad=True)
        shapes = (classes, inputs.shape[-1]), (classes,)
        parts += [inputs, *((scale * torch.randn(shape, dtype=dtype)).requires_grad_() for shape in shapes)]
    return Maps(*parts), torch.randint(classes, (rows,))


def plain(maps: Maps, rows: Rows, options: Options) -> dict[str, Tensor]:
    """The objective and its terms from whole logits, by the plain equations."""
    o, a, r = (nn.functional.linear(*maps[3 * i : 3 * i + 3]) for i in range(3))  # type: ignore[arg-type]
    stopped = a.detach()
    if maps.b_inputs is not None:
        stopped = nn.functional.linear(maps.b_inputs, maps.a_weight.detach(), maps.a_bias.detach())
    noise = all_noise(rows.noise, o, options)
    terms = objective.plain_terms(o, a, stopped, r, noise, rows.target, options, rows.class_weight)
    rest = options.kl_weight * terms["kl"] - options.entropy_weight * terms["entropy"]
    rest = rest + options.auxiliary_weight * terms["auxiliary"]
    rest = rest if rows.row_weight is None else rest * rows.row_weight
    return {"total": rest + options.cross_entropy_weight * terms["cross_entropy"], **terms}


def assert_same(maps: Maps, rows: Rows, options: Options, block: int, tolerance: float) -> None:
    """Compare values and gradients, each relative to the largest number of its kind."""
    found, expected = losses(maps, rows, options, block_size=block), plain(maps, rows, options)
    weight = torch.rand_like(expected["total"])
    inputs = list(dict.fromkeys(x for x in maps if x is not None))
    gradients = [
        torch.autograd.grad(total, inputs, weight, allow_unused=True) for total in (found.total, expected["total"])
    ]
    values = [(found.total, expected["total"]), (found.cross_entropy, expected["cross_entropy"])]
    values += [(found.kl_less_entropy, expected["kl"] - expected["entropy"]), (found.auxiliary, expected["auxiliary"])]
    if block < len(maps.o_weight):
        values.append((found.entropy, expected["entropy"]))
        assert not found.retain_logits.numel()
    for x, y in [*values, *zip(*gradients, strict=True)]:
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
    h = torch.ones(2, 1)
    maps = Maps(*(x for logits in (o, a, r) for x in (h, torch.zeros(4, 1), logits.requires_grad_())))
    rows = Rows(torch.tensor([0, 3]), torch.full((samples, 2, 4), 0.3).squeeze(0))
    options = Options(samples=samples, label_smoothing=0.5, mask_gradient=True)
    found, expected = losses(maps, rows, options, block_size=block), plain(maps, rows, options)
    torch.testing.assert_close(found.total, expected["total"], rtol=1e-5, atol=0)
    first = losses(maps, rows, options._replace(label_smoothing=0.0), block_size=block).cross_entropy[0]
    nll = plain(maps, rows, options._replace(label_smoothing=0.0))["cross_entropy"][0]
    assert first.item() == pytest.approx(nll.item(), rel=1e-5)  # as large as log 2, unlike the other
    assert first.item() < 2
    gradients = [torch.autograd.grad(x.sum(), (o, a, r)) for x in (found.total, expected["total"])]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@given(
    rows=st.integers(1, 9),
    classes=st.integers(2, 40),
    block=st.integers(1, 45),
    weighted=st.booleans(),
    stop=st.sampled_from(["logits", "parameters"]),
    options=st.fixed_dictionaries(
        {
            "samples": st.sampled_from([1, 3]),
            "label_smoothing": st.sampled_from([0.0, 0.2]),
            "mask_gradient": st.booleans(),
            "base_rate": st.sampled_from([0.0, 2.0]),
            "temperature": st.sampled_from([0.1, 0.7]),
            "epsilon": st.sampled_from([1e-20, 1e-3]),
            "entropy_weight": st.sampled_from([1.0, 0.3]),
        }
    ),
    rank=st.sampled_from([0, 2]),
    seeded=st.booleans(),
    double=st.booleans(),
    keep=st.booleans(),
    seed=st.integers(0, 999),
)
def test_any_blocks_give_what_the_plain_equations_give(
    rows: int,
    classes: int,
    block: int,
    weighted: bool,
    stop: str,
    options: dict[str, Any],
    rank: int,
    seeded: bool,
    double: bool,
    keep: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    dtype = torch.float64 if double else torch.float32
    maps, target = problem(rows, 5, classes, dtype, rank=rank)
    if stop == "parameters":
        maps = maps._replace(b_inputs=maps.a_inputs)
    samples = options["samples"]
    noise = torch.rand((rows, classes) if samples == 1 else (samples, rows, classes), dtype=dtype)
    class_weight = torch.rand(classes, dtype=dtype) if weighted else None
    row_weight = None if class_weight is None else class_weight[target]
    given_rows = Rows(target, draw_words(samples * rows + classes) if seeded else noise, class_weight, row_weight)
    with pytest.MonkeyPatch.context() as patch:
        if not keep:
            patch.setattr("dropmax.losses._may_keep", lambda *_: False)
        assert_same(maps, given_rows, Options(**options), block, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_targets_in_every_block_and_on_every_edge(dtype: torch.dtype) -> None:
    maps, _ = problem(11, 4, 11, dtype)
    assert_same(maps, Rows(torch.arange(11), torch.rand(11, 11, dtype=dtype)), Options(), 3, TOLERANCE[dtype])


@pytest.mark.parametrize("group", [1, 12, 50])
@pytest.mark.parametrize(
    "options", [{}, {"mask_gradient": True}, {"samples": 2, "label_smoothing": 0.1, "mask_gradient": True}], ids=str
)
def test_rows_in_groups_of_any_size(options: dict[str, Any], group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "GROUP_NUMBERS", group)
    maps, target = problem(7, 4, 11, torch.float64)
    maps = maps._replace(b_inputs=maps.a_inputs)
    words = draw_words(7 * options.get("samples", 1) + 11)
    assert_same(maps, Rows(target, words), Options(**options), 4, 1e-10)


@pytest.mark.parametrize("scale", [1e-3, 5.0, 30.0])
def test_small_and_large_logits_keep_their_digits(scale: float) -> None:
    maps, target = problem(6, 8, 50, scale=scale)
    rows = Rows(target, torch.rand(6, 50))
    options = Options(mask_gradient=True)  # hard masks may differ where u is as good as g
    found = losses(maps, rows, options, block_size=16)
    wide = plain(Maps(*(x if x is None else x.double() for x in maps)), Rows(target, rows.noise.double()), options)
    torch.testing.assert_close(found.total.double(), wide["total"], rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(found.cross_entropy.double(), wide["cross_entropy"], rtol=2e-5, atol=2e-5)


def test_many_classes_that_are_all_but_certain_keep_their_small_terms() -> None:
    # 1 - 7e-7 has two digits of 7e-7 left in float32. The total is good to its own rounding; the hook is exact.
    classes, zero = 4000, torch.zeros(4000, 1)
    a, r = torch.full((classes,), -14.2), torch.full((classes,), -0.3)
    h, u, target = torch.ones(1, 1), torch.full((1, classes), 0.5), torch.tensor([0])
    maps = Maps(h, zero, zero[:, 0], h, zero, a, h, zero, r)
    found = losses(maps, Rows(target, u), Options(), block_size=512)
    narrow = plain(maps, Rows(target, u), Options())
    wide = plain(Maps(*(x if x is None else x.double() for x in maps)), Rows(target, u.double()), Options())
    assert float(narrow["entropy"]) == pytest.approx(float(wide["entropy"]), rel=1e-5)
    assert float(narrow["kl"]) == pytest.approx(float(wide["kl"]), rel=1e-5)
    assert float(found.total) == pytest.approx(float(wide["total"]), rel=1e-5)


def test_second_derivatives_are_those_of_the_plain_equations() -> None:
    maps, target = problem(3, 4, 7, torch.float64)
    rows, options = Rows(target, torch.rand(3, 7, dtype=torch.float64)), Options(mask_gradient=True)
    inputs = list(dict.fromkeys(x for x in maps if x is not None))

    def penalty(total: Tensor) -> tuple[Tensor, ...]:
        (slope,) = torch.autograd.grad(total.sum(), maps.o_inputs, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), inputs, allow_unused=True)

    found = penalty(losses(maps, rows, options, block_size=3).total)
    torch.testing.assert_close(found, penalty(plain(maps, rows, options)["total"]))


def test_frozen_maps_get_no_gradient() -> None:
    maps, target = problem(3, 4, 7)
    maps.a_weight.requires_grad_(False)
    maps.o_inputs.requires_grad_(False)
    losses(maps, Rows(target, draw_words(3 + 7)), Options(), block_size=3).total.sum().backward()
    leaves = (maps.o_inputs, *(maps[i] for i in (1, 2, 4, 5, 7, 8)))
    assert [x is not None and x.grad is None for x in leaves] == [True, False, False, True, False, False, False]


def test_a_backward_pass_can_be_repeated() -> None:
    maps, target = problem(3, 4, 7)
    total = losses(maps, Rows(target, draw_words(3 + 7)), Options(), block_size=3).total.sum()
    inputs = [maps.o_inputs, maps.o_weight, maps.r_bias]
    first = torch.autograd.grad(total, inputs, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(total, inputs), first, rtol=0, atol=0)


def test_blocks_are_even_and_no_wider_than_asked() -> None:
    assert choose_block(128, 10) == 10
    for rows, classes in ((64, 1_000_000), (256, 100_000), (8192, 128_000), (1, 5000)):
        block = choose_block(rows, classes)
        assert block <= max(256, 2**19 // rows) + 64
        assert math.ceil(classes / block) * block - classes < 64 * math.ceil(classes / block)


# --- noise ------------------------------------------------------------------------------------------------------------


def test_noise_is_uniform_and_its_neighbours_are_independent() -> None:
    u = uniform(draw_words(400 + 3000), 400)
    assert 0 < float(u.min()) < 1e-4
    assert 1 - 1e-4 < float(u.max()) < 1
    assert stats.kstest(u.flatten().double().numpy(), "uniform").pvalue > 1e-3
    centred = (u - 0.5) * math.sqrt(12)
    size = math.sqrt(u.numel())
    for down, right in ((0, 1), (1, 0), (1, 1), (0, 2), (5, 7)):
        pairs = centred[: 400 - down, : 3000 - right] * centred[down:, right:]
        assert abs(float(pairs.mean())) * size < 4
    # Numbers start from sums of two words, so corners of rectangles are where a weak mix would show.
    corners = centred[:-1, :-1] * centred[1:, 1:] * centred[:-1, 1:] * centred[1:, :-1]
    assert abs(float(corners.mean())) * size < 4
    bits = (u[::2, ::2] > 0.5) * 8 + (u[1::2, ::2] > 0.5) * 4 + (u[::2, 1::2] > 0.5) * 2 + (u[1::2, 1::2] > 0.5)
    assert stats.chisquare(torch.bincount(bits.flatten(), minlength=16).numpy()).pvalue > 1e-3


def test_words_differ_and_follow_the_global_generator() -> None:
    torch.manual_seed(5)
    first, second = (uniform(draw_words(50 + 60), 50) for _ in range(2))
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 0.08
    torch.manual_seed(5)
    assert torch.equal(first, uniform(draw_words(50 + 60), 50))


# --- the head ---------------------------------------------------------------------------------------------------------

OPTIONS: list[dict[str, Any]] = [
    {},
    {"prior_correction": True, "mask_gradient": False, "kl_weight": 0.3, "entropy_weight": 2.0},
    {"stop_gradient": "parameters", "temperature": 0.5, "samples": 2, "mask_gradient": True},
    {"rank": 3},
    {"rank": 3, "stop_gradient": "parameters", "mask_gradient": True},
    {"label_smoothing": 0.2, "class_weight": torch.arange(1.0, 24.0).tolist(), "ignore_index": 3},
    {"class_weight": torch.arange(1.0, 24.0).tolist()},
]


def pair(options: dict[str, Any], chunk: int = 5, **more: Any) -> tuple[DropMax, DropMax]:
    heads = [DropMax(6, 23, chunk_classes=size, **options, **more) for size in (chunk, 0)]
    heads[1].load_state_dict(heads[0].state_dict())
    return heads[0], heads[1]


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_chunked_head_has_the_same_loss_and_gradients(
    options: dict[str, Any], reduction: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def losses_of(*args: Any, **more: Any) -> Any:
        asked.append(more.pop("keep"))
        return losses(*args, **more, keep=keep)

    monkeypatch.setattr(dropmax_head, "losses", losses_of)
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
    assert asked == [False, True]  # who asks for blocks asks for little memory


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
    monkeypatch.setattr(dropmax_head, "choose_block", lambda *a: calls.append(a) or choose_block(*a))
    by_itself, never = DropMax(6, 23), DropMax(6, 23, chunk_classes=0)
    for rows in (10, 11):
        for head in (by_itself, never):
            head.loss(torch.randn(rows, 6), torch.zeros(rows, dtype=torch.long)).total.backward()
    assert calls == [(11, 23)]


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

    weights = {name: p.detach() for name, p in head.named_parameters()}
    by_transform = torch.func.grad(lambda own: loss_at(head, own, features, target, noise))(weights)
    head.loss(features, target, noise=noise).total.backward()
    for name, p in head.named_parameters():
        torch.testing.assert_close(by_transform[name], p.grad)
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
        patch.setattr(walk, "_compiled", lambda: objective.block)  # generating code takes most of a minute
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
        ({"chunk_classes": 2.5}, r"chunk_classes must be a whole number, got 2\.5"),
        ({"name": "dropmax-unmasked"}, "the loss of 'dropmax-unmasked' has no blocked form"),
        ({"name": "dropmax-softmax-retain"}, "the loss of 'dropmax-softmax-retain' has no blocked form"),
    ],
)
def test_what_cannot_be_chunked_says_so(options: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidType, InvalidValue), match=message):
        make_head(**{"name": "dropmax", "in_features": 4, "num_classes": 9, "chunk_classes": 8, **options})
