"""The diagnosis of a trained model, against what can be counted or enumerated."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from PIL import Image
from torch import nn

from dropmax import Classifier, DropMaxError, make_head
from dropmax.lab.diagnostics import confusion_tracking, diagnose
from dropmax.workbench.data import load
from tests import enumeration as naive
from tests.cli.asking import answer, as_json, predicted, refusal


def batch(n: int = 30) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(3 * torch.randn(n, 6), torch.randint(5, (n,)))]


def test_the_true_posterior_is_bayes_rule_over_all_masks() -> None:
    head = make_head("dropmax", 6, 5).double()
    (x, y), *_ = batches = [(x.double(), y) for x, y in batch(4)]
    found = diagnose(Classifier(nn.Identity(), head), batches, repeats=2)
    masks = naive.all_masks(5)
    target, rivals = [], []
    for h, t in zip(x, y, strict=True):
        prior = naive.mask_probabilities(masks, head.retain_probs(h))
        joint = prior * naive.likelihoods(head.classifier(h), masks)[:, t]
        marginals = (joint[:, None] * masks).sum(0) / joint.sum()
        target.append(marginals[t])
        rivals += [m for k, m in enumerate(marginals) if k != t]
    assert found.posterior["target"]["true"] == pytest.approx(torch.stack(target).mean().item(), abs=1e-8)
    assert found.posterior["rivals"]["true"] == pytest.approx(torch.stack(rivals).mean().item(), abs=1e-8)
    assert found.posterior["target"]["q"] == 1
    assert len(found.marginals) == 16


def test_sampling_errs_less_with_more_samples_and_its_gradient_is_noisy() -> None:
    found = diagnose(Classifier(nn.Identity(), make_head("dropmax", 6, 5)), batch(), repeats=30)
    errors = [row["rms_error"] for row in found.monte_carlo]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] / errors[-1] == pytest.approx(1000**0.5, rel=0.5)
    assert all(row["time_ratio"] > 0 for row in found.monte_carlo)
    assert found.gradient["psi"]["sampled_std"] > 0.01
    assert found.gradient["psi"]["sampled_bias"] < found.gradient["psi"]["sampled_std"]
    assert 0 < found.modes["difference"] < 1


def test_the_head_is_left_as_it_was() -> None:
    head = make_head("dropmax", 6, 5, samples=3, likelihood="exact")
    diagnose(Classifier(nn.Identity(), head), batch(), repeats=2)
    assert (head.likelihood, head.samples) == ("exact", 3)


def test_heads_without_a_posterior_or_without_masks() -> None:
    assert diagnose(Classifier(nn.Identity(), make_head("dropmax-qp", 6, 5)), batch()).gradient == {}
    with pytest.raises(DropMaxError, match="'softmax' learns no masks, so there is nothing to diagnose"):
        diagnose(Classifier(nn.Identity(), make_head("softmax", 6, 5)), batch())


def test_the_command_prints_tables_and_draws_a_picture(run: Path) -> None:
    said = answer("diagnose", run, "--examples", 200)
    for words in ("true posterior", "Monte Carlo against exact", "mean absolute difference", "sampled: bias"):
        assert words in said
    report = json.loads((run / "diagnosis.json").read_text())
    assert report["examples"] == 200
    assert report["provenance"]["seeds"] == [0]
    with Image.open(run / "diagnosis.png") as picture:
        assert picture.width > 1000
    assert "there is no directory" in refusal("diagnose", run / "nothing")


def test_exact_mode_on_the_command_line(run: Path, tmp_path: Path) -> None:
    mean, exact = (as_json("evaluate", run, "--mode", mode)["nll"] for mode in ("mean", "exact"))
    assert mean != exact
    np.savez(tmp_path / "x.npz", x=load("mnist-1k").test.inputs[:3].numpy())
    asked = (run, tmp_path / "x.npz", "--mode", "exact")
    assert all(0 < row["std_1"] < 0.5 for row in predicted(*asked))
    assert "±" in answer("predict", *asked)


def test_confusion_tracking_is_spearmans_correlation_over_pairs_of_classes() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(6, (500,), generator=generator)
    predicted = torch.randint(6, (500,), generator=generator)
    retain = torch.rand(500, 6, generator=generator)
    pairs = [(j, k) for j in range(6) for k in range(6) if j != k]
    rho = [retain[labels == j, k].mean().item() for j, k in pairs]
    confused = [(predicted[labels == j] == k).float().mean().item() for j, k in pairs]
    expected = scipy.stats.spearmanr(rho, confused).statistic
    assert confusion_tracking(retain, labels, predicted) == pytest.approx(expected, abs=1e-6)
