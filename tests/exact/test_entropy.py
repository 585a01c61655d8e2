"""Expected entropy and mutual information, beyond the sums over all 2^K masks of test_values.py."""

from __future__ import annotations

import math

import pytest
import torch

from dropmax import exact
from dropmax.errors import InvalidValue
from tests.exact.naive import ENTROPIES, draw


def test_a_class_ruled_out_and_masks_that_are_certain() -> None:
    logits = torch.tensor([0.0, 1.0, -math.inf], dtype=torch.float64)
    retain_logits = torch.tensor([math.inf, 0.0, 2.0], dtype=torch.float64)
    # Class 0 is always kept, so with probability 1/2 it stands alone and with 1/2 against class 1.
    p = torch.sigmoid(torch.tensor(1.0, dtype=torch.float64))
    entropy = float(torch.special.entr(torch.stack((p, 1 - p))).sum())
    assert float(exact.expected_entropy(logits, retain_logits)) == pytest.approx(entropy / 2, abs=1e-10)


def test_a_thousand_classes_against_sampling() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, retain_logits, _ = draw(1, (1000,), 4.0, 3.0, torch.float64)
    masks = torch.rand(4000, 1000, generator=generator, dtype=torch.float64) < retain_logits.sigmoid()
    entropies = torch.special.entr(logits.expand_as(masks).masked_fill(~masks, -math.inf).softmax(-1)).sum(-1)
    standard_error = float(entropies.std()) / math.sqrt(len(entropies))
    assert float(exact.expected_entropy(logits, retain_logits)) == pytest.approx(
        float(entropies.mean()), abs=4 * standard_error
    )


def test_rows_do_not_depend_on_each_other_and_there_is_no_gradient() -> None:
    logits, retain_logits, _ = draw(2, (5, 6), 30.0, 5.0, torch.float64)
    whole = exact.expected_entropy(logits.requires_grad_(), retain_logits)
    assert not whole.requires_grad
    alone = torch.stack([exact.expected_entropy(o, a) for o, a in zip(logits, retain_logits, strict=True)])
    torch.testing.assert_close(whole, alone, rtol=0, atol=1e-12)


def test_bad_input() -> None:
    for function, _ in ENTROPIES:
        with pytest.raises(InvalidValue, match="expected one of each for every class"):
            function(torch.zeros(2, 3), torch.zeros(2, 4))
        assert function(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0,)
