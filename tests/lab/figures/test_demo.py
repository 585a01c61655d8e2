"""The demo's picture: its counts against a plain loop, its choice of digits, and pictures of few or no mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from dropmax.lab.figures.demo import SURE, contrast, draw_demo, surest_mistakes
from dropmax.workbench.evaluation import Outputs


def answers(seed: int, examples: int = 300, sharpness: float = 4.0) -> Outputs:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(examples) % 10
    logits = torch.randn(examples, 10, generator=generator)
    logits[torch.arange(examples), labels] += 1.0
    return Outputs((sharpness * logits).softmax(-1), torch.rand(examples, 10, generator=generator), labels)


def test_the_counts_are_those_of_a_plain_loop() -> None:
    base, other = answers(1), answers(2)
    wrong, sure, fixed, broken = [0, 0], [0, 0], 0, 0
    for row in range(len(base.labels)):
        truth = int(base.labels[row])
        said = [int(one.probs[row].argmax()) for one in (base, other)]
        for place, one in enumerate((base, other)):
            if said[place] != truth:
                wrong[place] += 1
                sure[place] += float(one.probs[row].max()) > SURE
        fixed += said[0] != truth and said[1] == truth
        broken += said[0] == truth and said[1] != truth
    found = contrast(base, other)
    assert (list(found.wrong), found.fixed, found.broken, list(found.sure_and_wrong)) == (wrong, fixed, broken, sure)
    assert min(*wrong, *sure, fixed, broken) > 0  # every count was put to the test
    assert found.wrong[0] - found.fixed == found.wrong[1] - found.broken


def test_the_digits_shown_are_the_surest_mistakes_one_per_class() -> None:
    base = answers(3)
    wrong = base.predicted != base.labels
    chosen = surest_mistakes(base, wrong, 8)
    confidence = base.probs.amax(-1)
    assert len({int(base.labels[i]) for i in chosen}) == len(chosen) == 8
    assert all(wrong[i] for i in chosen)
    assert confidence[chosen].tolist() == sorted(confidence[chosen].tolist(), reverse=True)
    for index in chosen:
        rivals = confidence[wrong & (base.labels == base.labels[index])]
        assert float(confidence[index]) == float(rivals.max())


@pytest.mark.parametrize("mistakes", [0, 1, 40])
def test_a_picture_is_drawn_however_few_mistakes_there_are(tmp_path: Path, mistakes: int) -> None:
    labels = torch.arange(40) % 10
    probs = torch.full((40, 10), 0.01).scatter(1, labels[:, None], 0.91)
    probs[:mistakes] = probs[:mistakes].roll(1, -1)
    base = Outputs(probs, torch.rand(40, 10), labels)
    draw_demo(tmp_path / "demo.png", torch.zeros(40, 1, 28, 28, dtype=torch.uint8), base, base)
    with Image.open(tmp_path / "demo.png") as picture:
        assert picture.width > 1000
