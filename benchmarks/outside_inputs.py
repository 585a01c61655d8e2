"""How well are inputs of no class told from the others? ``python -m benchmarks.outside_inputs RUN [RUN ...]``.

For each trained run of MNIST-1K or of CUB's features, inputs that belong to none of its classes are made, and three
things are measured: AUROC and FPR at 95 % of each outside score against the test rows, and the share of them that the
run calls "unlike anything it was trained on", beside the share of test rows that it calls so. The inputs:

- ``letters``: 2,600 letters A to Z of four single-stroke Hershey fonts (``pip install Hershey-Fonts``), 25 of each
  letter and font, drawn as MNIST's digits are: strokes of varying width, slanted, turned and stretched at random,
  smoothed, fitted into 20 x 20 pixels and centred by mass in 28 x 28. They are not handwriting.
- ``letters without look-alikes``: those but B, G, I, O, Q, S and Z, which can be read as digits.
- ``noise``, ``inverted digits``, ``blank``, ``cifar-100 in grey``: uniform noise, MNIST's test digits dark on light,
  images of one grey value, and CIFAR-100's test images in grey at 28 x 28.
- ``cifar-100``: for CUB, 2,000 test images of CIFAR-100 through the network that made CUB's features,
  EfficientNet-Lite0, enlarged from 32 pixels as ``dropmax embed`` does.

Results are appended to a file, one line per run and kind of input; what is there already is not measured again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from torch import Tensor

from benchmarks.rows import markdown, mean_and_deviation, measure_runs, parser
from dropmax import Head
from dropmax.calibration import Calibration
from dropmax.outside import SCORES, tell_apart
from dropmax.workbench.data import load
from dropmax.workbench.data.images import centre_crop, square
from dropmax.workbench.evaluation import answer, calibrate
from dropmax.workbench.training import load_data, load_model

FONTS = ("futural", "rowmans", "cursive", "scripts")
LOOK_ALIKES = frozenset("BGIOQSZ")
PER_LETTER = 25


def letters(seed: int = 0) -> tuple[Tensor, list[str]]:
    """Return letters (n, 1, 28, 28) uint8 as described above, and which letter each is."""
    from HersheyFonts import HersheyFonts

    random, images, names = np.random.default_rng(seed), [], []
    for font in FONTS:
        strokes = HersheyFonts()
        strokes.load_default_font(font)
        for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ":
            lines = np.array(list(strokes.lines_for_text(letter)), dtype=float)  # (lines, 2 ends, 2)
            for _ in range(PER_LETTER):
                images.append(_drawn(lines, random))
                names.append(letter)
    return torch.from_numpy(np.stack(images))[:, None], names


def _drawn(lines: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draw one letter as MNIST's digits are: jittered, smoothed, 20 x 20 at most, centred by mass."""
    turn, slant = random.normal(0, 0.12), random.normal(0.1, 0.2)
    stretch = math.exp(random.normal(0, 0.12))
    change = np.array([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]])
    change = change @ np.array([[stretch, -slant], [0, 1 / stretch]])
    points = (lines - lines.mean((0, 1))) @ change.T
    points -= points.min((0, 1))
    points *= 160 / points.max()
    canvas = Image.new("L", (224, 224))  # eight times as large as the result
    pen, width = ImageDraw.Draw(canvas), int(random.integers(12, 26))
    for (x1, y1), (x2, y2) in points + 32:
        pen.line((x1, y1, x2, y2), fill=255, width=width)
        for x, y in ((x1, y1), (x2, y2)):
            pen.ellipse((x - width / 2, y - width / 2, x + width / 2, y + width / 2), fill=255)
    drawn = canvas.filter(ImageFilter.GaussianBlur(4)).crop(canvas.getbbox())
    scale = 20 / max(drawn.size)
    small = np.asarray(drawn.resize([max(1, round(side * scale)) for side in drawn.size], Image.Resampling.BOX))
    small = np.minimum(255, small * (255 / max(1, small.max()))).astype(np.uint8)
    rows, columns = (np.arange(side) for side in small.shape)
    mass = small.sum()
    top = round(14 - float((small.sum(1) * (rows + 0.5)).sum() / mass))
    left = round(14 - float((small.sum(0) * (columns + 0.5)).sum() / mass))
    top, left = (min(max(0, start), 28 - side) for start, side in zip((top, left), small.shape, strict=True))
    image = np.zeros((28, 28), np.uint8)
    image[top : top + small.shape[0], left : left + small.shape[1]] = small
    return image


@cache
def beside_mnist() -> dict[str, Tensor]:
    """Return inputs (n, 1, 28, 28) that are no digits."""
    drawn, names = letters()
    plain = torch.tensor([name not in LOOK_ALIKES for name in names])
    generator = torch.Generator().manual_seed(0)
    grey = load("cifar-100").test.inputs[:2000].float().mul(torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1)
    return {
        "letters": drawn,
        "letters without look-alikes": drawn[plain],
        "noise": torch.randint(256, (1000, 1, 28, 28), dtype=torch.uint8, generator=generator),
        "inverted digits": 255 - load("mnist-1k").test.inputs[:1000],
        "blank": torch.arange(256, dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 28, 28).contiguous(),
        "cifar-100 in grey": grey[:, None, 2:30, 2:30].round().to(torch.uint8),
    }


@cache
def beside_cub() -> dict[str, Tensor]:
    """Return features (n, 1280) of photographs that are no birds."""
    from dropmax.workbench.backbones import load_backbone

    backbone = load_backbone("efficientnet-lite0")
    found = []
    for image in load("cifar-100").test.inputs[:2000]:
        large = square(Image.fromarray(image.permute(1, 2, 0).numpy()), backbone.stored_size)
        found.append(backbone(torch.from_numpy(centre_crop(large, *2 * [backbone.image_size])[None].copy())))
    return {"cifar-100": torch.cat(found)}


def unlike(head: Head, features: Tensor, limits: Mapping[str, float]) -> float:
    """Return the share of rows that are called unlike anything the model was trained on, with these limits."""
    assert head.calibration is not None
    head.calibration = replace(head.calibration, outside=limits)
    states = [verdict.state for verdict in answer(head, features).verdicts()]
    return states.count("unlike") / len(states)


@torch.no_grad()
def measure(path: Path) -> list[dict[str, Any]]:
    """Measure one run against all inputs that belong to none of its classes."""
    trained = load_model(path)
    recipe, head, net = trained.recipe, trained.model.head, trained.model.net
    data = load_data(recipe, run=path)
    others = beside_cub() if Path(recipe.data.name).name.startswith("cub") else beside_mnist()
    if not recipe.training.refit:
        calibrate(trained.model, trained.batches(data.validation))
    assert head.calibration is not None
    inside = torch.cat([net(x) for x, _ in trained.batches(data.test)])
    limits = {"all": head.calibration.outside}
    if not recipe.training.refit:  # what the energy alone would do; held-out rows of the model before cannot tell
        held = [(net(x), y) for x, y in trained.batches(data.validation)]
        features, y = torch.cat([h for h, _ in held]), torch.cat([y for _, y in held])
        energy = {"energy": head.outside_score(features)}
        limits["energy"] = Calibration.fit({"mean": head.predict_proba(features)}, y, outside=energy).outside
    rows = []
    for kind, inputs in others.items():
        features = torch.cat([net(trained.prepare(some)) for some in torch.split(inputs, 500)])
        found = {name: unlike(head, features, each) for name, each in limits.items()}
        scores = tell_apart(head, inside, features)
        rows.append({"outside": kind, "inputs": len(inputs), "scores": scores, "unlike": found})
    found = {name: unlike(head, inside, each) for name, each in limits.items()}
    return [*rows, {"outside": "test rows", "inputs": len(inside), "scores": {}, "unlike": found}]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return AUROC and FPR at 95 % of each score as Markdown: means over seeds, and their standard deviations."""
    lines = []
    rows = [row for row in rows if row["scores"]]
    for key in dict.fromkeys((row["data"], row["outside"], row["head"]) for row in rows):
        mine = [row["scores"] for row in rows if (row["data"], row["outside"], row["head"]) == key]
        cells = []
        for kind in SCORES:
            areas, rates = ([one[kind][name] for one in mine if kind in one] for name in ("auroc", "fpr95"))
            shown = f"{mean_and_deviation(areas, 3)}; {mean_and_deviation([100 * rate for rate in rates], 1)} %"
            cells.append(shown if areas else "")
        lines.append([*key, *cells])
    return markdown(["data", "outside", "head", *SCORES], lines)


def shares(rows: Sequence[dict[str, Any]]) -> str:
    """Return the shares (%) called unlike anything the model was trained on, as Markdown."""
    lines = []
    for key in dict.fromkeys((row["data"], row["outside"]) for row in rows):
        cells = []
        for head, name in (("softmax", "all"), ("dropmax", "energy"), ("dropmax", "all")):
            mine = [row["unlike"] for row in rows if (row["data"], row["outside"], row["head"]) == (*key, head)]
            cells.append(mean_and_deviation([100 * one[name] for one in mine if name in one], 1))
        lines.append([*key, *cells])
    return markdown(["data", "inputs", "softmax", "dropmax, energy alone", "dropmax"], lines)


def main() -> None:
    """Measure the runs that are not there yet, and print the table of all."""
    arguments = parser(__doc__, "results/outside.jsonl")
    arguments.add_argument("runs", nargs="*", type=Path)
    options = arguments.parse_args()
    rows = measure_runs(options.runs, options.out, measure)
    print(f"AUROC; FPR at 95 %\n\n{table(rows)}\n\nCalled unlike anything it was trained on\n\n{shares(rows)}")


if __name__ == "__main__":
    main()
