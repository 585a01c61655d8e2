"""Outside scores against sums over all masks."""

from __future__ import annotations

import math

import pytest
import torch

from dropmax import make_head
from dropmax.errors import InvalidValue
from tests import enumeration as naive
from tests.close import close


def test_scores_of_a_head_with_masks_are_sums_over_all_of_them() -> None:
    torch.manual_seed(0)
    head = make_head("dropmax", 4, 5).double()
    with torch.no_grad():
        head.classifier.weight.mul_(3)
    for h in torch.randn(6, 4, dtype=torch.float64):
        o, rho = head.classifier(h).detach(), head.retain(h).detach().sigmoid()
        masks = naive.all_masks(5)
        weight, p = naive.mask_probabilities(masks, rho), naive.likelihoods(o, masks)
        mean = (o.exp() * rho) / (o.exp() * rho).sum()
        expected = {
            "energy": -math.log(float((o.exp() * rho).sum())),
            "probability": 1 - float(mean.max()),
            "entropy": float(weight @ torch.special.entr(p).sum(-1)),
        }
        total = float(torch.special.entr(weight @ p).sum())
        expected["information"] = total - expected["entropy"]
        for kind, value in expected.items():
            close(head.outside_score(h[None], kind)[0], value, terms=100, scale=1000)  # quadrature: about 1e-12
        close(head.outside_score(h), expected["energy"], terms=10, scale=10)


def test_scores_of_a_head_without_masks_and_an_unknown_one() -> None:
    head, h = make_head("softmax", 4, 3), torch.randn(7, 2, 4)
    p = head.classifier(h).softmax(-1)
    close(head.outside_score(h, "entropy"), torch.special.entr(p).sum(-1), terms=3)
    assert head.outside_score(h, "information").eq(0).all()
    assert head.outside_score(h).shape == (7, 2)
    with pytest.raises(InvalidValue, match="unknown kind 'enery': did you mean 'energy'"):
        head.outside_score(h, "enery")
