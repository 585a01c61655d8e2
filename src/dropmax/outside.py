"""Scores that tell inputs unlike the training data from the rest: :meth:`dropmax.Head.outside_score`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dropmax import exact
from dropmax.checks import check_choice
from dropmax.functional import _wide

if TYPE_CHECKING:
    from dropmax.heads import Head

__all__ = ["SCORES", "outside_score"]

#: Each kind of score, in words.
SCORES = {
    "probability": "one minus the highest probability",
    "energy": "minus the log of the sum of all exp(logit)",
    "entropy": "expected entropy of the answer over all masks",
    "information": "mutual information between answer and masks",
}


def outside_score(head: Head, features: Tensor, kind: str = "energy") -> Tensor:
    """Return how unlike the training data each row of features is ``(...)``: the higher, the more.

    ``"energy"`` is ``-log sum_k exp(logit_k)`` of the logits that ``head(features)`` returns, and ``"probability"`` is
    ``1 - max_k p(k)`` of the mean prediction. Exact inference has two more: ``"entropy"``, the expected entropy of the
    answer over the masks (:func:`dropmax.exact.expected_entropy`), and ``"information"``, what the masks say about the
    answer (:func:`dropmax.exact.mutual_information`). For a head without masks the first is the entropy of its
    prediction and the second is 0. docs/calibration.md says how well each finds inputs of other kinds.

    >>> from dropmax import DropMax
    >>> outside_score(DropMax(4, 3), torch.randn(5, 4)).shape
    torch.Size([5])
    """
    check_choice("kind", kind, SCORES)
    if kind == "energy":
        return -_wide(head(features)).logsumexp(-1)
    probs = head.predict_proba(features)
    if kind == "probability":
        return 1 - probs.amax(-1)
    if not head.masked:
        entropy = torch.special.entr(probs).sum(-1)
        return entropy if kind == "entropy" else torch.zeros_like(entropy)
    logits = head.prediction_maps(features)
    score = exact.expected_entropy if kind == "entropy" else exact.mutual_information
    return head.check_finite("the scores", score(_wide(logits["classifier"]), _wide(logits["retain"])))
