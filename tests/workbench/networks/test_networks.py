"""The networks themselves: sizes derived by hand, shapes, gradients, and what compilers and dtypes ask of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dropmax.errors import InvalidType, InvalidValue
from dropmax.heads import HEADS, make_head
from dropmax.workbench.networks import (
    MLP,
    BasicBlock,
    CifarResNet,
    LeNet,
    ResNet,
    SmallCNN,
    TutorialCNN,
    WideResNet,
)
from dropmax.workbench.networks.common import initialise_head

torch.set_num_threads(1)

# One of each kind, small where the kind allows it, with the shape of one example.
SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tutorial-cnn": (lambda: TutorialCNN((1, 13, 10), hidden=32), (1, 13, 10)),
    "lenet": (lambda: LeNet((1, 16, 17), hidden=32), (1, 16, 17)),
    "cifar-resnet-a": (lambda: CifarResNet((3, 12, 12), depth=14, shortcut="A"), (3, 12, 12)),
    "cifar-resnet-b": (lambda: CifarResNet((3, 12, 12), depth=14, shortcut="B"), (3, 12, 12)),
    "resnet-7x7": (lambda: ResNet(18, (3, 64, 64), "7x7", widths=(8, 8, 16, 16)), (3, 64, 64)),
    "resnet-3x3": (lambda: ResNet(18, (3, 16, 16), "3x3", widths=(8, 8, 16, 16)), (3, 16, 16)),
    "wide-resnet": (lambda: WideResNet((3, 12, 12), depth=10, width=2, dropout=0.2), (3, 12, 12)),
    "small-cnn": (lambda: SmallCNN((3, 12, 12), widths=(16, 24), convs_per_block=2), (3, 12, 12)),
    "mlp": (lambda: MLP(20, hidden=(16, 8), dropout=0.2), (20,)),
}
each_kind = pytest.mark.parametrize(("make", "shape"), SMALL.values(), ids=SMALL)


def batch(shape: tuple[int, ...], n: int = 4) -> torch.Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(0))


def count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


# Numbers of parameters, from layer shapes.


def conv(kernel: int, before: int, after: int, bias: bool = False) -> int:
    return kernel * kernel * before * after + bias * after


def conv_bn(kernel: int, before: int, after: int) -> int:
    return conv(kernel, before, after) + 2 * after


def thin_resnet(n: int, projections: bool) -> int:
    """16-32-64: in a stage of n blocks there are 2n convolutions, of which the first may change the width."""
    stages = 2 * n * conv_bn(3, 16, 16)
    for before, after in ((16, 32), (32, 64)):
        stages += conv_bn(3, before, after) + (2 * n - 1) * conv_bn(3, after, after)
        stages += projections * conv_bn(1, before, after)
    return conv_bn(3, 3, 16) + stages


def wide_resnet(n: int, width: int) -> int:
    total, before = conv(3, 3, 16), 16
    for after in (16 * width, 32 * width, 64 * width):
        total += conv(1, before, after) if before != after else 0
        for _ in range(n):
            total += 2 * before + conv(3, before, after) + 2 * after + conv(3, after, after)
            before = after
    return total + 2 * before


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (TutorialCNN(), conv(5, 1, 32, True) + conv(5, 32, 64, True) + 7 * 7 * 64 * 1024 + 1024),
        (TutorialCNN((3, 30, 33)), conv(5, 3, 32, True) + conv(5, 32, 64, True) + 8 * 9 * 64 * 1024 + 1024),
        (LeNet(), conv(5, 1, 20, True) + conv(5, 20, 50, True) + 4 * 4 * 50 * 500 + 500),
        (LeNet((3, 32, 32)), conv(5, 3, 20, True) + conv(5, 20, 50, True) + 5 * 5 * 50 * 500 + 500),
        (CifarResNet(depth=20, shortcut="A"), 269_072),  # the published 0.27 M: 269,722 with 650 in the last layer
        (CifarResNet(depth=20, shortcut="A"), thin_resnet(3, projections=False)),
        (CifarResNet(depth=20), thin_resnet(3, projections=True)),
        (CifarResNet(), thin_resnet(5, projections=True)),
        (CifarResNet(depth=56, shortcut="A"), thin_resnet(9, projections=False)),
        (ResNet(18), 11_176_512),
        (ResNet(34), 21_284_672),
        (ResNet(18, stem="3x3"), 11_176_512 - conv(7, 3, 64) + conv(3, 3, 64)),
        (WideResNet(), wide_resnet(2, 1)),
        (WideResNet(depth=28, width=2), wide_resnet(4, 2)),
        (WideResNet(depth=16, width=8), 10_961_370 - 513 * 10),  # the published 11.0 M, without its last layer
        (SmallCNN(), conv_bn(3, 3, 64) + conv_bn(3, 64, 128) + conv_bn(3, 128, 256)),
        (SmallCNN(widths=(8, 16), convs_per_block=2), sum(conv_bn(3, *w) for w in ((3, 8), (8, 8), (8, 16), (16, 16)))),
        (MLP(64), (64 * 256 + 256) + (256 * 256 + 256)),
        (MLP(64, hidden=()), 0),
    ],
)
def test_number_of_parameters(network: nn.Module, expected: int) -> None:
    assert count(network) == expected


@pytest.mark.parametrize(
    ("network", "size"), [*((TutorialCNN, s) for s in (1, 7, 31)), *((LeNet, s) for s in (16, 17, 40))]
)
def test_networks_for_mnist_take_other_sizes(network: type[LeNet | TutorialCNN], size: int) -> None:
    assert network((2, size, size), hidden=8)(torch.zeros(2, 2, size, size)).shape == (2, 8)


def feature_map_size(network: nn.Module, layer: nn.Module, size: int) -> int:
    seen: list[int] = []
    handle = layer.register_forward_hook(lambda _, __, output: seen.append(output.shape[-1]))
    network.eval()(torch.zeros(1, 3, size, size))
    handle.remove()
    return seen[0]


def test_stems_and_stages_shrink_the_image_as_documented() -> None:
    narrow = (4, 4, 4, 4)
    big, small = (ResNet(18, stem=stem, widths=narrow) for stem in ("7x7", "3x3"))
    thin = CifarResNet(depth=8)
    assert feature_map_size(big, big.stages, 224) == 7
    assert feature_map_size(small, small.stages, 32) == 4
    assert feature_map_size(thin, thin.stages, 32) == 8
    wide = WideResNet()
    assert feature_map_size(wide, wide.blocks, 32) == 8


def test_a_wide_block_whose_residual_branch_is_closed_is_its_input() -> None:
    first = WideResNet().eval().blocks[0]
    nn.init.zeros_(first.conv2.weight)  # type: ignore[union-attr, arg-type]
    x = batch((16, 4, 4))
    assert torch.equal(first(x), x)  # no activation behind the sum, unlike BasicBlock


@pytest.mark.parametrize(("depth", "nearest"), [(14, 16), (4, 10), (27, 28)])
def test_a_wide_resnet_says_which_depths_there_are(depth: int, nearest: int) -> None:
    with pytest.raises(InvalidValue, match=rf"depth 6n \+ 4 .*, got {depth}: try {nearest}"):
        WideResNet(depth=depth)


def test_shortcut_a_takes_every_second_pixel_and_pads_channels_on_both_sides() -> None:
    block = BasicBlock(2, 6, stride=2, shortcut="A").eval()
    nn.init.zeros_(block.bn2.weight)  # closes the residual branch: what is left is relu of the shortcut
    x = batch((2, 5, 5)).abs()
    out = block(x)
    assert torch.equal(out[:, 2:4], x[:, :, ::2, ::2])
    assert out[:, [0, 1, 4, 5]].abs().max() == 0


def test_zero_init_residual_makes_every_block_its_shortcut() -> None:
    network = CifarResNet(depth=8, zero_init_residual=True).eval()
    first = network.stages[0][0]  # type: ignore[index]
    x = batch((16, 4, 4)).abs()
    assert torch.equal(first(x), x)
    assert not torch.equal(CifarResNet(depth=8).eval().stages[0][0](x), x)  # type: ignore[index]


@pytest.mark.parametrize("init", ["glorot", None])
def test_tutorial_cnn_init(init: str | None) -> None:
    network = TutorialCNN(init=init) if init else TutorialCNN()
    weight = network.fc.weight.detach()
    std, largest = float(weight.std()), float(weight.abs().max())
    if init == "glorot":
        bound = (6 / (3136 + 1024)) ** 0.5
        assert largest <= bound
        assert std == pytest.approx(bound / 3**0.5, rel=0.01)
        assert bool((network.fc.bias == 0).all())
    else:
        assert largest <= 0.2
        assert std == pytest.approx(0.08796, rel=0.01)  # of a normal of deviation 0.1 cut at two deviations
        assert bool((network.fc.bias == 0.1).all())


def test_resnet_convolutions_start_with_variance_two_over_fan_out() -> None:
    for module in ResNet(18).modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 50_000:
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            assert float(module.weight.detach().var()) * fan_out == pytest.approx(2, rel=0.03)


@each_kind
def test_features_have_out_features_and_gradients_reach_every_parameter(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    network = make()
    h = network(batch(shape, 8))
    assert h.shape == (8, network.out_features)
    h.square().sum().backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@each_kind
def test_evaluation_is_deterministic_and_treats_examples_apart(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    network, x = make().eval(), batch(shape)
    with torch.no_grad():
        whole = network(x)
        assert torch.equal(whole, network(x))
        torch.testing.assert_close(torch.cat([network(one[None]) for one in x]), whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "network",
    [
        LeNet((1, 16, 16), hidden=1000, dropout=0.5),
        TutorialCNN((1, 16, 16), hidden=1000),
        MLP(256, hidden=(1000,), dropout=0.5),
    ],
    ids=lambda network: type(network).__name__,
)
def test_half_the_features_are_dropped_in_training_only(network: nn.Module) -> None:
    x = batch((1, 16, 16)).abs()
    whole, dropped = network.eval()(x), network.train()(x)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * whole[kept])
    share = float(kept[whole != 0].double().mean())
    assert share == pytest.approx(0.5, abs=0.05)  # of about 2,000 features: a standard deviation of 0.011


def test_dropout_of_a_residual_network_acts_in_training_only() -> None:
    network, x = CifarResNet(depth=8, dropout=0.5), torch.randn(8, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(network.eval()(x), network(x))
        dropped = float((network.train()(x) == 0).double().mean())
    assert dropped == pytest.approx(0.5, abs=0.1)  # of 512 features: a standard deviation of 0.022


@pytest.mark.parametrize(("make", "shape"), [SMALL[kind] for kind in SMALL if kind != "mlp"])
def test_channels_last_gives_the_same_features(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    network, x = make().eval(), batch(shape)
    formats: list[bool] = []
    with torch.no_grad():
        expected = network(x)
        network = network.to(memory_format=torch.channels_last)
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                module.register_forward_hook(
                    lambda _, inputs, __: formats.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
                )
        torch.testing.assert_close(network(x.to(memory_format=torch.channels_last)), expected, rtol=1e-4, atol=1e-5)
    assert all(formats), "some layer fell back to the other memory format"


@each_kind
def test_bfloat16_autocast_on_cpu(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    network, x = make(), batch(shape)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        network(x).float().square().mean().backward()
    assert all(p.grad is not None and p.dtype == p.grad.dtype == torch.float32 for p in network.parameters())
    network.eval()
    with torch.no_grad():
        expected = network(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = network(x)
    assert h.dtype == torch.bfloat16
    assert (h - expected).abs().max() < 0.05 * expected.abs().max()


@each_kind
@pytest.mark.parametrize("training", [False, True])
def test_compiles_in_one_graph(make: Callable[[], nn.Module], shape: tuple[int, ...], training: bool) -> None:
    torch._dynamo.reset()
    network, x = make().train(training), batch(shape)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    if training:
        compiled(x).sum().backward()
        assert all(parameter.grad is not None for parameter in network.parameters())
    else:
        torch.testing.assert_close(compiled(x), network(x))


@each_kind
def test_exports_with_any_batch_size(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    network = make().eval()
    dynamic = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(network, (batch(shape),), dynamic_shapes=dynamic)
    x = batch(shape, 7)
    torch.testing.assert_close(program.module()(x), network(x))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: LeNet((1, 8, 8)), InvalidValue, r"shape \(1, 8, 8\): the smallest that works is \(1, 16, 16\)"),
        (lambda: LeNet((3, 28, 15)), InvalidValue, r"shape \(3, 28, 15\): the smallest that works is \(3, 16, 16\)"),
        (lambda: SmallCNN((3, 3, 32)), InvalidValue, r"shape \(3, 3, 32\): the smallest that works is \(3, 4, 4\)"),
        (lambda: TutorialCNN((28, 28)), InvalidValue, r"\(channels, height, width\), got input_shape \(28, 28\)"),
        (lambda: TutorialCNN((1, 28, 0)), InvalidValue, r"positive integers only, got \(1, 28, 0\)"),
        (lambda: TutorialCNN((1, 28.0, 28)), InvalidType, r"sequence of integers, got \(1, 28.0, 28\)"),
        (lambda: TutorialCNN(dropout=1.0), InvalidValue, r"dropout must lie in \[0, 1\), got 1.0"),
        (lambda: CifarResNet(dropout=1.5), InvalidValue, r"dropout must lie in \[0, 1\), got 1.5"),
        (lambda: TutorialCNN(dropout="half"), InvalidType, r"dropout must be a number, got 'half'"),
        (lambda: TutorialCNN(init="glorott"), InvalidValue, "unknown init 'glorott': did you mean 'glorot'"),
        (lambda: CifarResNet(depth=34), InvalidValue, r"depth 6n \+ 2 \(.*\), got 34: try 32"),
        (lambda: CifarResNet(depth=2), InvalidValue, r"got 2: try 8"),
        (lambda: CifarResNet(widths=(16, 32)), InvalidValue, r"three widths, got \(16, 32\)"),
        (lambda: CifarResNet(shortcut="C"), InvalidValue, "unknown shortcut 'C': it is 'A'"),
        (lambda: CifarResNet(widths=(64, 32, 16), shortcut="A"), InvalidValue, "from 64 down to 32: use 'B'"),
        (lambda: ResNet(50), InvalidValue, "depth 18 or 34, got 50"),
        (lambda: ResNet(18, stem="5x5"), InvalidValue, "unknown stem '5x5'"),
        (lambda: ResNet(18, widths=(64,)), InvalidValue, r"four widths, got \(64,\)"),
        (lambda: SmallCNN(widths=()), InvalidValue, "widths is empty"),
        (lambda: SmallCNN(convs_per_block=0), InvalidValue, "convs_per_block must hold positive"),
        (lambda: MLP(0), InvalidValue, "in_features must hold positive integers"),
        (
            lambda: initialise_head(make_head("softmax", 4, 3), "gloro"),
            InvalidValue,
            "head_init 'gloro': did you mean 'gl",
        ),
        (lambda: MLP(4, hidden=256), InvalidType, "hidden must be a sequence of integers, got 256"),
        (lambda: LeNet()(torch.zeros(2, 1, 32, 32)), InvalidValue, r"\(N, 1, 28, 28\), got \(2, 1, 32, 32\)"),
        (lambda: TutorialCNN()(torch.zeros(2, 3, 28, 28)), InvalidValue, r"\(N, 1, 28, 28\), got \(2, 3, 28, 28\)"),
        (lambda: MLP(64)(torch.zeros(2, 8, 9)), InvalidValue, r"64 numbers per example, got 72 .*\(2, 8, 9\)"),
    ],
)
def test_what_cannot_work_is_refused_and_says_what_would(
    call: Callable[[], object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("name", HEADS)
def test_a_head_starts_as_its_source_does(name: str) -> None:
    torch.manual_seed(0)
    head = make_head(name, 400, 50)
    before = {key: value.clone() for key, value in head.state_dict().items()}
    initialise_head(head, "default")
    assert all(torch.equal(before[key], value) for key, value in head.state_dict().items())

    for scheme, deviation, bias in (("glorot", (2 / (400 + 50)) ** 0.5, 0.0), ("truncated-normal", 0.088, 0.1)):
        initialise_head(head, scheme)
        for key, value in head.state_dict().items():
            if key.endswith("bias"):
                assert bool((value == torch.tensor(bias)).all())
            else:
                # 20,000 draws: the sample's deviation is within 3 %. Cutting a normal of deviation 0.1 at 0.2
                # leaves 0.088.
                assert value.std().item() == pytest.approx(deviation, rel=0.03)
                assert value.abs().max() <= (0.2 if bias else (6 / 450) ** 0.5)


def test_lenet_without_dropout_draws_no_random_numbers() -> None:
    net = LeNet((1, 16, 16), hidden=8).train()
    state = torch.get_rng_state()
    net(torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state)
