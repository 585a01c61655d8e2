"""Scores that tell inputs unlike the training data from the rest: :meth:`dropmax.Head.outside_score`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dropmax import exact, metrics
from dropmax.checks import check_choice
from dropmax.functional import _wide

if TYPE_CHECKING:
    from dropmax.heads import Head

__all__ = ["SCORES", "kinds_of", "outside_score", "tell_apart"]

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


def kinds_of(head: Head) -> list[str]:
    """Return the kinds of :data:`SCORES` that say something about a head: without masks, ``"information"`` is 0."""
    return [kind for kind in SCORES if head.masked or kind != "information"]


@torch.no_grad()
def tell_apart(head: Head, inside: Tensor, outside: Tensor) -> dict[str, dict[str, float]]:
    """Measure how well each score tells features of no class from those of the classes.

    Returns ``{kind: {"auroc": ..., "fpr95": ...}}``, see :func:`dropmax.metrics.auroc` and
    :func:`dropmax.metrics.fpr_at`.

    >>> from dropmax import Softmax
    >>> sorted(tell_apart(Softmax(4, 3), torch.randn(9, 4), torch.randn(5, 4)))
    ['energy', 'entropy', 'probability']
    """
    found = {}
    for kind in kinds_of(head):
        low, high = (outside_score(head, rows, kind).cpu() for rows in (inside, outside))
        found[kind] = {"auroc": metrics.auroc(low, high), "fpr95": metrics.fpr_at(low, high)}
    return found
