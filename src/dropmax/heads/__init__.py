"""The classification heads, one file each, and the registry that makes them by name."""

from __future__ import annotations

from typing import Any

from dropmax.errors import InvalidType, InvalidValue, unknown
from dropmax.heads.ablations import DropMaxSoftmaxRetain, DropMaxUnmasked
from dropmax.heads.base import MODES, Head, Loss
from dropmax.heads.deterministic import DeterministicAttention, DeterministicDropMax
from dropmax.heads.dropmax import PAPER_OBJECTIVE, DropMax
from dropmax.heads.dropmax_qp import DropMaxQP
from dropmax.heads.focal import Focal
from dropmax.heads.label_posterior import DropMaxLabelPosterior
from dropmax.heads.online_label_smoothing import OnlineLabelSmoothing
from dropmax.heads.options import option_names, unknown_option
from dropmax.heads.random_dropmax import RandomDropMax
from dropmax.heads.sampled_softmax import SampledSoftmax
from dropmax.heads.sigsoftmax import SigSoftmax
from dropmax.heads.softmax import Softmax
from dropmax.heads.sparsemax import Sparsemax
from dropmax.heads.theta_prior import DropMaxThetaPrior

__all__ = [
    "ABLATIONS",
    "FURTHER",
    "HEADS",
    "MODES",
    "PAPER_OBJECTIVE",
    "DeterministicAttention",
    "DeterministicDropMax",
    "DropMax",
    "DropMaxLabelPosterior",
    "DropMaxQP",
    "DropMaxSoftmaxRetain",
    "DropMaxThetaPrior",
    "DropMaxUnmasked",
    "Focal",
    "Head",
    "Loss",
    "OnlineLabelSmoothing",
    "RandomDropMax",
    "SampledSoftmax",
    "SigSoftmax",
    "Softmax",
    "Sparsemax",
    "find_head",
    "make_head",
]

#: Every head by name, in the order of the paper's Table 1.
HEADS: dict[str, type[Head]] = {
    head.name: head
    for head in (
        Softmax,
        Sparsemax,
        SampledSoftmax,
        RandomDropMax,
        DeterministicAttention,
        DeterministicDropMax,
        DropMaxQP,
        DropMax,
    )
}

#: Further baselines, by name: rows of a table when asked for.
FURTHER: dict[str, type[Head]] = {head.name: head for head in (Focal, SigSoftmax, OnlineLabelSmoothing)}

#: Heads for ablations, by name: :func:`make_head` makes them too, but they are no rows of the table.
ABLATIONS: dict[str, type[Head]] = {
    head.name: head for head in (DropMaxUnmasked, DropMaxSoftmaxRetain, DropMaxThetaPrior, DropMaxLabelPosterior)
}


def find_head(name: str) -> type[Head]:
    """Return the head called ``name`` in :data:`HEADS`, :data:`FURTHER` or :data:`ABLATIONS`.

    >>> find_head("focal").__name__
    'Focal'
    """
    for heads in (HEADS, FURTHER, ABLATIONS):
        if name in heads:
            return heads[name]
    raise InvalidValue(unknown("head", name, (*HEADS, *FURTHER)))


def make_head(name: str, in_features: int, num_classes: int, **options: Any) -> Head:
    """Make a head by its name (:func:`find_head`).

    >>> make_head("dropmax", in_features=512, num_classes=100, temperature=0.5)
    DropMax(in_features=512, num_classes=100, temperature=0.5)
    """
    head = find_head(name)
    for option in options:
        if option not in (*option_names(head), "device", "dtype"):
            raise InvalidType(unknown_option(head, option))
    return head(in_features, num_classes, **options)
