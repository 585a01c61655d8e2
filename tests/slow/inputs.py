"""What the numerics campaign tries: every head with its losses and modes, on rows of numbers that may go wrong.

The rows of a batch hold ordinary logits, spreads of 1e4, 1e30 and half of the largest number, subnormal ones, all
equal, one class far ahead or far behind, noise of exactly 0. Features are the unit vectors and the maps' weights hold
the logits, so that the matrix product is exact in every dtype (bfloat16's may turn subnormal numbers into zeros, which
nobody sees).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dropmax import PAPER_OBJECTIVE, make_head
from dropmax.heads import ABLATIONS, FURTHER, HEADS, MODES, Head

#: Masks of heads that draw several.
SAMPLES = 3

#: How the logits of a row are drawn.
FAMILIES = ("ordinary", "wide", "huge", "1e30", "largest", "subnormal", "equal", "ahead", "behind", "zeros")

DROPMAX_LOSSES: tuple[dict[str, Any], ...] = (
    PAPER_OBJECTIVE,
    {"prior_correction": False},
    {"mask_gradient": True},
    {"stop_gradient": "parameters", "samples": SAMPLES},
    {"epsilon": 1e-35},
    {"epsilon": 1e-6, "temperature": 1.0},
    {"likelihood": "exact"},
    {"likelihood": "exact", "mask_gradient": True, "prior_correction": False},
    {"likelihood": "marginal"},
    {"chunk_classes": 3},
    {"chunk_classes": 1, "prior_correction": False, "mask_gradient": True},
    {"chunk_classes": 4, "label_smoothing": 0.1, "samples": SAMPLES, "class_weight": True},
    {"chunk_classes": 4, "label_smoothing": 0.1, "stop_gradient": "parameters"},
)


class Subject(NamedTuple):
    """Something whose numbers are tried."""

    head: str
    options: dict[str, Any]
    what: str  # "loss", or a mode of prediction

    def __str__(self) -> str:
        options = "".join(f" {k}={v}" for k, v in self.options.items())
        return f"{self.head}{options} {self.what}"


def subjects() -> list[Subject]:
    """Return every head with its losses and modes."""
    found = []
    for name in (*HEADS, *FURTHER, *ABLATIONS):
        found += [Subject(name, {}, mode) for mode in MODES]
        if name == "dropmax-theta-prior":  # its loss adds squares of weights, which overflow for the largest inputs
            continue
        found += [Subject(name, options, "loss") for options in ({}, {"label_smoothing": 0.1}, {"class_weight": True})]
    return found + [Subject("dropmax", options, "loss") for options in DROPMAX_LOSSES]


class Batch(NamedTuple):
    """Logits of some rows in the dtype of the head, their labels, and noise in the dtype of the arithmetic."""

    logits: dict[str, Tensor]  # by the name of the map
    target: Tensor
    noise: Tensor  # (SAMPLES, rows, classes)
    ordinary: Tensor  # rows without any extreme number

    def first(self, rows: int) -> Batch:
        """Return the first rows."""
        logits = {name: x[:rows] for name, x in self.logits.items()}
        return Batch(logits, self.target[:rows], self.noise[:, :rows], self.ordinary[:rows])


def draw(seed: int, rows: int, classes: int, dtype: torch.dtype) -> Batch:
    """Draw a batch: each row gets a family of numbers for each of its o, a and r."""
    generator = torch.Generator().manual_seed(seed)
    logits, ordinary = {}, torch.ones(rows, dtype=torch.bool)
    for name in ("classifier", "retain", "correction"):
        family = torch.randint(len(FAMILIES), (rows,), generator=generator)
        family[: rows // 4] = 0  # enough rows where all three are ordinary
        ordinary &= family == 0
        every = torch.stack([_numbers(f, generator, rows, classes, dtype) for f in FAMILIES])
        logits[name] = every[family, torch.arange(rows)].to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    noise = torch.rand(SAMPLES, rows, classes, dtype=wide, generator=generator)
    target = torch.randint(classes, (rows,), generator=generator)
    return Batch(logits, target, noise, ordinary)


def _numbers(family: str, generator: torch.Generator, rows: int, classes: int, dtype: torch.dtype) -> Tensor:
    limits = torch.finfo(dtype)
    normal = torch.randn(rows, classes, dtype=torch.float64, generator=generator)
    one = torch.nn.functional.one_hot(torch.randint(classes, (rows,), generator=generator), classes).double()
    sizes = torch.tensor([1.0, 1e2, 1e4, min(1e30, limits.max / 8)], dtype=torch.float64)
    size = sizes[torch.randint(4, (rows, 1), generator=generator)]
    if family == "ordinary":
        return 3 * normal
    if family == "wide":
        return 30 * normal
    if family == "huge":
        return (1e4 * normal).clamp(limits.min / 8, limits.max / 8)
    if family == "1e30":
        return normal.sign() * min(1e30, limits.max / 8)
    if family == "largest":  # how masked-out classes are often written; a sum over all classes stays finite
        lowest = max(limits.min / 4, torch.finfo(torch.float32 if dtype != torch.float64 else dtype).min / 2000)
        return torch.where(normal > 0, normal, lowest)
    if family == "subnormal":
        return normal * limits.tiny / 4
    if family == "equal":
        return (normal[:, :1].sign() * size).expand(rows, classes)
    if family == "ahead":
        return one * size
    if family == "behind":
        return -one * size
    return torch.copysign(torch.zeros_like(normal), normal)  # zeros of both signs


def head_with(subject: Subject, batch: Batch, dtype: torch.dtype) -> tuple[Head, Tensor]:
    """Return the head whose logits of row i, given the i-th unit vector, are those of the batch; and these vectors."""
    rows, classes = batch.logits["classifier"].shape
    options = _with_weights(subject.options, classes)
    head = make_head(subject.head, rows, classes, dtype=dtype, **options)
    with torch.no_grad():
        for name in head.maps.values():
            getattr(head, name).weight.copy_(batch.logits[name].T)
            getattr(head, name).bias.zero_()
    return head, torch.eye(rows, dtype=dtype)


def _with_weights(options: dict[str, Any], classes: int) -> dict[str, Any]:
    if "class_weight" not in options:
        return options
    return options | {"class_weight": [0.0, *(1 + k / classes for k in range(1, classes))]}  # a weight of 0, too
