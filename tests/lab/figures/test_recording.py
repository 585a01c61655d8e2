"""A recording is of the run itself: the same steps, losses and weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dropmax.lab.figures import recording
from dropmax.lab.figures.runs import load_runs
from dropmax.workbench.data import Batches
from dropmax.workbench.training import Interrupted, build
from tests.lab.figures.small import make_run, write_data


def test_it_repeats_the_run_and_sees_its_losses(image_runs: list[Path], tmp_path: Path) -> None:
    for run in load_runs(image_runs[:2]):
        found = recording.record(run, tmp_path, command="a test", quiet=True)
        assert found.same_weights
        steps = run.log[-1]["step"]
        assert found.steps == list(range(1, steps + 1))
        assert found.test_steps == list(range(steps + 1))
        # With the masks that training drew, the batches of an epoch average to what its log says.
        size, batch = len(run.train), run.recipe.training.batch_size
        each = math.ceil(size / batch)
        weights = [min(batch, size - batch * i) for i in range(each)]
        for epoch, row in enumerate(run.log):
            losses = found.train_with_masks[each * epoch : each * (epoch + 1)]
            mean = sum(w * x for w, x in zip(weights, losses, strict=True)) / size
            assert mean == pytest.approx(row["train"]["cross_entropy"], rel=1e-5)
        # After the last step the test loss is the trained model's.
        with torch.no_grad():
            expected = F.cross_entropy(run.head(run.features()), run.test.labels)
        assert found.test[-1] == pytest.approx(float(expected), rel=1e-5)
        # Softmax has no masks to draw.
        assert (found.train == pytest.approx(found.train_with_masks, rel=1e-5)) == (run.head.name == "softmax")


def test_a_run_that_was_fitted_again_on_all_rows_is_repeated_whole(tmp_path: Path) -> None:
    data = write_data(tmp_path / "d.npz", ["a", "b", "c"], images=False)
    (run,) = load_runs([make_run(tmp_path / "run", data, "dropmax", epochs=2, refit=True)])
    assert recording.record(run, tmp_path, quiet=True).same_weights


def test_many_steps_are_averaged_in_windows(
    image_runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = load_runs(image_runs[1:2])
    whole = recording.record(run, tmp_path / "whole", quiet=True)
    monkeypatch.setattr(recording, "_POINTS", 7)
    monkeypatch.setattr(recording, "_TESTS", 3)
    short = recording.record(run, tmp_path / "short", quiet=True)
    window = math.ceil(len(whole.steps) / 7)
    assert short.steps[0] == window
    assert short.steps[-1] == whole.steps[-1]
    starts = range(0, len(whole.steps), window)
    for name in ("train", "train_with_masks", "gradient_norm"):
        values = getattr(whole, name)
        means = [sum(values[s : s + window]) / len(values[s : s + window]) for s in starts]
        assert getattr(short, name) == pytest.approx(means)
    assert len(short.test) == 4


def test_the_gradient_is_that_of_the_classifier(image_runs: list[Path], tmp_path: Path) -> None:
    """The first step's norm, from the loss at the seed's own weights on the first batch."""
    (run,) = load_runs(image_runs[:1])
    found = recording.record(run, tmp_path, quiet=True)
    options = run.recipe.training
    torch.manual_seed(options.seed)
    model = build(run.recipe, run.trained.input_shape, len(run.classes))
    order = torch.Generator().manual_seed(options.seed)
    train = Batches(run.train, options.batch_size, run.trained.mean, run.trained.std, shuffle=True, generator=order)
    x, y = next(iter(train))
    model(x, y).total.backward()
    squares = sum(float(p.grad.double().square().sum()) for p in model.head.classifier.parameters())
    assert found.gradient_norm[0] == pytest.approx(math.sqrt(squares), rel=1e-5)


def test_an_interrupted_recording_leaves_nothing_behind(
    image_runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise Interrupted("go on with: dropmax train --resume somewhere")

    monkeypatch.setattr(recording, "fit", stop)
    (run,) = load_runs(image_runs[:1])
    with pytest.raises(Interrupted, match="will be recorded from its beginning next time"):
        recording.record(run, tmp_path, quiet=True)
    assert list((tmp_path / "recordings").iterdir()) == []
