"""The classification heads, one file each, and the registry that makes them by name."""

from __future__ import annotations

from dropmax.heads.ablations import DropMaxRelaxed, DropMaxSoftmaxRetain, DropMaxUnmasked
from dropmax.heads.base import MODES, Head, Loss
from dropmax.heads.deterministic import DeterministicAttention, DeterministicDropMax
from dropmax.heads.dropmax import PAPER_OBJECTIVE, DropMax
from dropmax.heads.dropmax_qp import DropMaxQP
from dropmax.heads.focal import Focal
from dropmax.heads.label_posterior import DropMaxLabelPosterior
from dropmax.heads.online_label_smoothing import OnlineLabelSmoothing
from dropmax.heads.random_dropmax import RandomDropMax
from dropmax.heads.registry import ABLATIONS, FURTHER, HEADS, find_head, findable_name, make_head, register_head
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
    "DropMaxRelaxed",
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
    "findable_name",
    "make_head",
    "register_head",
]
