"""dropmax: a softmax that learns, for each input, which rival classes deserve attention."""

from __future__ import annotations

from dropmax import functional
from dropmax.classifier import Classifier, replace_head
from dropmax.errors import DropMaxError
from dropmax.heads import (
    HEADS,
    DeterministicAttention,
    DeterministicDropMax,
    DropMax,
    DropMaxQP,
    Head,
    Loss,
    RandomDropMax,
    SampledSoftmax,
    Softmax,
    Sparsemax,
    make_head,
)

__version__ = "0.1.0"

__all__ = [
    "HEADS",
    "Classifier",
    "DeterministicAttention",
    "DeterministicDropMax",
    "DropMax",
    "DropMaxError",
    "DropMaxQP",
    "Head",
    "Loss",
    "RandomDropMax",
    "SampledSoftmax",
    "Softmax",
    "Sparsemax",
    "functional",
    "make_head",
    "replace_head",
]
