"""Tiny runs for the tests of figures and reports: seconds for all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from dropmax.workbench.recipes import load_recipe
from dropmax.workbench.training import train

#: A name that would be trouble in HTML, in mathematics and in Markdown.
HOSTILE = '<script>alert("x")</script> $\\frac{ & `](javascript:1) \n## evil'


def write_data(path: Path, classes: Sequence[str], *, images: bool = True, each: int = 14, seed: int = 0) -> Path:
    """Write an .npz of noisy pictures, a bright spot for each class, or of features."""
    generator = np.random.default_rng(seed)
    labels = np.arange(len(classes) * each) % len(classes)
    if images:
        x = generator.integers(0, 256, (len(labels), 10, 10)).astype(np.uint8)
        for row, k in enumerate(labels):
            x[row, (k * 3) % 10 : (k * 3) % 10 + 2, (k * 2) % 9 : (k * 2) % 9 + 2] //= 3
    else:
        centres = generator.normal(size=(len(classes), 5))
        x = (centres[labels] + 0.8 * generator.normal(size=(len(labels), 5))).astype(np.float32)
    np.savez(path, x=x, y=labels, classes=np.array(classes))
    return path


def make_run(path: Path, data: Path, head: str, *, seed: int = 0, epochs: int = 4, refit: bool = False) -> Path:
    """Train a small network on such a file."""
    torch.set_num_threads(1)
    training = {"epochs": epochs, "batch_size": 16, "learning_rate": 0.01, "seed": seed, "refit": refit}
    values = {"data.name": str(data), "network.hidden": [12], "head.name": head}
    values |= {f"training.{name}": value for name, value in training.items()}
    train(load_recipe("own-features").override(values), path, quiet=True)
    return path
