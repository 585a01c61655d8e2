"""Training: same bytes for the same seed, whatever happens on the way; and plain words when it cannot go on."""

from __future__ import annotations

import io
import math
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dropmax import metrics
from dropmax.errors import DropMaxError, InvalidValue, RunError
from dropmax.workbench.evaluation import predict
from dropmax.workbench.recipes import Recipe, load_recipe
from dropmax.workbench.training import RunDirectory, load_data, load_model, resume, train
from dropmax.workbench.training import session as session_
from dropmax.workbench.training.session import Session
from tests.close import close

FILES = ("metrics.jsonl", "model.safetensors", "recipe.toml")


def small(**overrides: Any) -> Recipe:
    values = {
        "training.epochs": 4,
        "training.validate_every": 2,
        "training.checkpoint_seconds": 0.0,
        "data.train_size": 300,
        "data.validation_size": 200,
    }
    values |= {name.replace("__", "."): value for name, value in overrides.items()}
    return load_recipe("mnist-1k", "released").override(values)


def contents(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in FILES}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "finished"
    train(small(), path, quiet=True)
    return path


def test_a_run_directory_a_person_understands(finished: Path) -> None:
    files = "calibration.json checkpoint-000003.pt checkpoint-000004.pt data.json environment.json"
    assert sorted(p.name for p in finished.iterdir()) == [*files.split(), *FILES]
    rows = RunDirectory(finished).metrics()
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    assert set(rows[0]["train"]) == {"total", "cross_entropy", "kl", "entropy", "auxiliary"}
    assert "validation" not in rows[0]
    assert {"error", "nll", "ece", "total", "kl"} <= set(rows[1]["validation"])
    assert 0 < rows[1]["masks"]["retain_rivals"] < 1
    assert {"command", "commit", "versions", "machine", "seeds"} <= set(RunDirectory(finished).environment())


def test_the_recipe_in_the_run_repeats_it(finished: Path, tmp_path: Path) -> None:
    train(load_recipe(finished / "recipe.toml"), tmp_path / "again", quiet=True)
    assert contents(tmp_path / "again") == contents(finished)


def test_how_often_one_validates_changes_nothing_about_the_weights(finished: Path, tmp_path: Path) -> None:
    train(small(training__validate_every=1), tmp_path / "run", quiet=True)
    ours, theirs = load_model(tmp_path / "run"), load_model(finished)
    for x, y in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(x, y)


def test_it_learns(tmp_path: Path) -> None:
    recipe = load_recipe("mnist-1k").override({"training.epochs": 15, "data.validation_size": 500})
    run = train(recipe, tmp_path / "run", quiet=True)
    trained = load_model(run.path)
    test = load_data(recipe).test
    outputs = predict(trained.model, trained.batches(test))
    assert metrics.error(outputs.probs, outputs.labels) < 0.1
    rho, y = outputs.retain, outputs.labels
    on_target = rho.gather(-1, y[:, None]).mean()
    assert on_target > (rho.sum(-1).mean() - on_target) / 9 + 0.2


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dropmax", "train", *map(str, arguments), "--threads", "1"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def write_recipe(path: Path, recipe: Recipe) -> Path:
    path.write_text(recipe.to_toml())
    return path


def wait_for(run: Path, name: str, worker: subprocess.Popen[str]) -> None:
    while not (run / name).exists():
        assert worker.poll() is None, worker.stderr.read() if worker.stderr else ""
        time.sleep(0.005)


def test_after_kill_9_at_any_moment_a_resumed_run_ends_with_the_same_bytes(tmp_path: Path) -> None:
    recipe = small(training__epochs=10)
    file = write_recipe(tmp_path / "recipe.toml", recipe)
    torch.set_num_threads(1)
    train(recipe, tmp_path / "whole", quiet=True)
    run = tmp_path / "killed"
    worker = start("--recipe", file, "--out", run)
    wait_for(run, "checkpoint-000002.pt", worker)
    worker.kill()
    worker.wait()
    assert not (run / "model.safetensors").exists()
    # A file that was being written when the process died, and a row of an epoch no checkpoint has seen.
    (run / ".checkpoint-000003.pt.abc.tmp").write_bytes(b"half")
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"epoch": 99}\n')
    for delay in (3.5, 60.0):
        worker = start("--resume", run)
        try:
            worker.wait(timeout=delay)
            assert worker.returncode == 0, worker.stderr.read() if worker.stderr else ""
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
    assert contents(run) == contents(tmp_path / "whole")
    assert not list(run.glob(".*"))


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_with_a_checkpoint_and_says_how_to_go_on(signal_: signal.Signals, tmp_path: Path) -> None:
    recipe = small(training__epochs=400, training__checkpoint_seconds=3600.0)
    run = tmp_path / "run"
    worker = start("--recipe", write_recipe(tmp_path / "r.toml", recipe), "--out", run)
    wait_for(run, "metrics.jsonl", worker)
    while len(RunDirectory(run).metrics()) < 2:
        time.sleep(0.01)
    worker.send_signal(signal_)
    _, errors = worker.communicate(timeout=60)
    assert worker.returncode == 130
    assert errors.strip().splitlines()[-1].endswith(f"resume with: dropmax train --resume {run}")
    assert "Traceback" not in errors
    checkpoint = RunDirectory(run).load_checkpoint()
    assert checkpoint is not None
    assert checkpoint["epoch"] >= 1


def test_two_processes_learn_what_one_learns(tmp_path: Path) -> None:
    # 290 examples do not divide evenly: the last batch has 45 for each rank, or one more for the first.
    recipe = small(data__train_size=291, training__epochs=3)
    train(recipe, tmp_path / "one", quiet=True)
    file = write_recipe(tmp_path / "recipe.toml", recipe)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dropmax"]
    command += ["train", "--recipe", str(file), "--out", str(tmp_path / "two"), "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    one, two = (RunDirectory(tmp_path / name).metrics()[-1] for name in ("one", "two"))
    for part in ("train", "validation", "masks"):
        for name, value in one[part].items():
            assert two[part][name] == pytest.approx(value, rel=2e-2, abs=1e-2), (part, name)
    assert one["train"]["kl"] == pytest.approx(two["train"]["kl"], rel=1e-3)


@pytest.mark.slow
def test_two_nodes_without_a_shared_disk_learn_what_one_learns(tmp_path: Path) -> None:
    recipe = small(data__train_size=200, training__epochs=2)
    train(recipe, tmp_path / "one", quiet=True)
    file = write_recipe(tmp_path / "recipe.toml", recipe)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = []
    for rank in range(2):
        place = tmp_path / f"node{rank}"
        place.mkdir()
        launch = f"--nnodes 2 --node-rank {rank} --nproc-per-node 1 --master-addr 127.0.0.1 --master-port {port}"
        command = [sys.executable, "-m", "torch.distributed.run", *launch.split(), "-m", "dropmax"]
        command += ["train", "--recipe", str(file), "--out", "two", "--threads", "1"]
        nodes.append(subprocess.Popen(command, cwd=place, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for node in nodes:
        said, errors = node.communicate(timeout=300)
        assert node.returncode == 0, said + errors
    assert not (tmp_path / "node1" / "two").exists()
    one, two = (RunDirectory(tmp_path / name).metrics()[-1] for name in ("one", "node0/two"))
    for name, value in one["train"].items():
        assert two["train"][name] == pytest.approx(value, rel=2e-2, abs=1e-2), name


def test_a_loss_that_is_no_longer_finite_is_named_and_the_last_good_state_kept(tmp_path: Path) -> None:
    recipe = small(training__learning_rate=1e20, training__optimizer="sgd")
    with pytest.raises(RunError, match=r"(inf|nan).* \(step \d+\); try a lower learning rate than 1e\+20"):
        train(recipe, tmp_path / "run", quiet=True)
    checkpoint = RunDirectory(tmp_path / "run").load_checkpoint()
    assert checkpoint is not None
    assert all(value.isfinite().all() for value in checkpoint["model"].values())
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        {"training__optimizer": "sgd", "training__learning_rate": 0.05},
        {"training__optimizer": "adamw", "training__schedule": "cosine"},
        {"training__clip_norm": 1.0, "training__channels_last": False},
        {"training__precision": "bfloat16"},
        {"head__name": "sampled-softmax", "network__name": "tutorial-cnn"},
        {"training__mixup": 0.4},
        {"training__refit": True},
        {"training__patience": 1, "training__refit": True, "training__validate_every": 1},
    ],
)
def test_every_option_trains_and_resumes_to_the_same_bytes(overrides: dict[str, Any], tmp_path: Path) -> None:
    recipe = small(**overrides, training__epochs=2, data__train_size=100)
    whole = train(recipe, tmp_path / "whole", quiet=True)
    assert math.isfinite(whole.metrics()[-1]["train"]["total"])
    partial = RunDirectory.create(tmp_path / "partial", recipe, {})
    (partial.path / "checkpoint-000001.pt").write_bytes((whole.path / "checkpoint-000001.pt").read_bytes())
    resume(partial.path, quiet=True)
    assert contents(partial.path) == contents(whole.path)


def test_patience_ends_a_run_and_keeps_the_best_epoch(tmp_path: Path) -> None:
    recipe = small(training__patience=2, training__epochs=12, training__learning_rate=0.02, training__validate_every=1)
    run = train(recipe, tmp_path / "run", quiet=True)
    rows = run.metrics()
    losses = [row["validation"]["nll"] for row in rows]
    best = losses.index(min(losses)) + 1
    assert [row["kept"] for row in rows] == [losses.index(min(losses[: i + 1])) + 1 for i in range(len(losses))]
    assert len(rows) == best + 2 < 12, "the loss of this learning rate rises soon"
    assert run.kept() == rows[best - 1]
    trained, data = load_model(run.path), load_data(recipe)
    found = predict(trained.model, trained.batches(data.validation), mode="mean")
    assert metrics.nll(found.probs, found.labels) == pytest.approx(min(losses), rel=1e-5)
    before = contents(run.path)
    resume(run.path, quiet=True)
    assert contents(run.path) == before, "it has ended"


def test_refitting_trains_anew_on_training_and_validation_rows(tmp_path: Path) -> None:
    recipe = small(training__epochs=2)
    once = train(recipe, tmp_path / "once", quiet=True)
    twice = train(recipe.override({"training.refit": True}), tmp_path / "twice", quiet=True)
    assert twice.metrics() == once.metrics(), "the log is that of the run with held-out rows"
    data = load_data(recipe)
    session = Session(recipe, data.with_validation_trained_on(), device="cpu")
    assert len(session.data.train) == len(data.train) + len(data.validation) == 500
    for _ in range(2):
        for group in session.optimizer.param_groups:
            group["lr"] = recipe.training.learning_rate_at(session.epoch)
        for x, y in session.remaining_batches():
            session.optimizer.zero_grad()
            session.loss(x, y)[0].total.backward()
            session.optimizer.step()
        session.next_epoch()
    for ours, naive in zip(load_model(twice.path).model.parameters(), session.model.parameters(), strict=True):
        close(ours, naive, terms=1000)
    assert not torch.equal(*(next(load_model(run.path).model.parameters()) for run in (once, twice)))


def test_mixed_rows_have_the_cross_entropy_of_mixed_labels() -> None:
    recipe = small(head__name="softmax", training__mixup=0.5, data__train_size=20)
    session = Session(recipe, load_data(recipe), device="cpu")
    x, y = next(session.remaining_batches())
    torch.manual_seed(3)
    loss, _ = session.loss(x, y)
    torch.manual_seed(3)
    weight = float(torch.distributions.Beta(0.5, 0.5).sample())
    order = torch.randperm(len(y))
    labels = weight * torch.eye(10)[y] + (1 - weight) * torch.eye(10)[y[order]]
    expected = torch.nn.functional.cross_entropy(session.model(weight * x + (1 - weight) * x[order]), labels)
    close(loss.total, expected)
    close(loss.terms["cross_entropy"], expected)


@pytest.mark.inductor
def test_compiled_training_agrees_with_eager(tmp_path: Path) -> None:
    # softmax, which draws no masks: compiled code has random numbers of its own
    eager, compiled = (
        train(small(head__name="softmax", training__epochs=1, training__compile=c), tmp_path / str(c), quiet=True)
        for c in (False, True)
    )
    for name, value in eager.metrics()[0]["train"].items():
        assert compiled.metrics()[0]["train"][name] == pytest.approx(value, rel=1e-3)


def test_weights_that_vanish_end_at_zero_and_not_in_slow_subnormal_numbers() -> None:
    weight = torch.nn.Parameter(torch.tensor([1e-3, -1.0]))
    optimizer = torch.optim.Adam([weight], lr=1e-4, weight_decay=1e-4)
    weight.grad = torch.zeros(2)  # of a dead unit
    least = []
    for _ in range(100):
        for _ in range(20):
            optimizer.step()
        least.append(float(weight.detach()[0].abs()))
        others = weight.detach()[1].clone(), optimizer.state[weight]["exp_avg"][1].clone()
        session_.flush_subnormals(optimizer)
        assert others == (weight.detach()[1], optimizer.state[weight]["exp_avg"][1])
    assert any(0 < x < session_.SMALLEST for x in least), "nothing vanished: the test tests nothing"
    assert [float(x[0]) for x in (weight.detach(), optimizer.state[weight]["exp_avg"])] == [0, 0]


def test_every_epoch_flushes_subnormals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_, "SMALLEST", 1e-3)
    train(small(), tmp_path / "run", quiet=True)
    weights = load_model(tmp_path / "run").model.state_dict()
    assert not any(((x != 0) & (x.abs() < 1e-3)).any() for x in weights.values())


def test_a_run_trained_further_is_the_run_that_was_planned_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constant = {"training__milestones": ()}  # where the learning rate does not depend on the number of epochs
    long = train(small(**constant, training__epochs=6), tmp_path / "long", quiet=True)
    short = train(small(**constant), tmp_path / "short", quiet=True)
    killed = Path(shutil.copytree(short.path, tmp_path / "killed"))
    resume(short.path, quiet=True)  # nothing is left to do
    assert len(short.metrics()) == 4
    resume(short.path, epochs=6, quiet=True)
    assert contents(short.path) == contents(long.path)
    with pytest.raises(InvalidValue, match="has been trained for 6 epochs already: give more than that, not 5"):
        resume(short.path, epochs=5, quiet=True)
    assert contents(short.path) == contents(long.path)

    def kill(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "save_checkpoint", kill)
        with pytest.raises(SystemExit):
            resume(killed, epochs=6, quiet=True)
    assert load_model(killed).recipe.training.epochs == 4, "the model of before is there until the new one is"
    resume(killed, quiet=True)
    assert contents(killed) == contents(long.path)
    for checkpoint in short.checkpoints():
        checkpoint.unlink()
    with pytest.raises(RunError, match="has no checkpoint to resume from"):
        resume(short.path, epochs=8, quiet=True)
    assert load_model(short.path).recipe.training.epochs == 6


def test_nothing_is_overwritten_without_force(finished: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(small(training__epochs=1), run, quiet=True)
    with pytest.raises(RunError, match=r"is not empty: resume with --resume .*, replace it with --force"):
        train(small(), run, quiet=True)
    (run / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match=r"holds 'notes.txt', which no run made: --force will not delete it"):
        train(small(), run, force=True, quiet=True)
    (run / "notes.txt").unlink()
    train(small(), run, force=True, quiet=True)
    assert contents(run) == contents(finished)


def test_a_checkpoint_that_is_damaged_or_has_code_in_it_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", small(), {})
    marker = tmp_path / "executed"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.system, (f"touch {marker}",))

    saved = io.BytesIO()
    torch.save({"epoch": 1, "model": Bomb()}, saved)
    armed = (pickle.dumps(Bomb()), saved.getvalue())
    for content in (*armed, b"", b"not a checkpoint", b"PK\x03\x04 half an archive"):
        (run.path / "checkpoint-000001.pt").write_bytes(content)
        with pytest.raises(RunError, match=r"checkpoint-000001\.pt .*delete it to resume from an older checkpoint"):
            resume(run.path, quiet=True)
    assert not marker.exists()


def test_a_checkpoint_of_another_head_or_recipe_is_refused(finished: Path, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", small(head__name="softmax"), {})
    (run.path / "checkpoint-000001.pt").write_bytes((finished / "checkpoint-000003.pt").read_bytes())
    with pytest.raises(RunError, match=r"was made with another recipe than its recipe\.toml"):
        resume(run.path, quiet=True)
    state = torch.load(finished / "checkpoint-000003.pt", weights_only=True)
    state["recipe"] = small(head__name="softmax").to_toml()
    torch.save(state, run.path / "checkpoint-000001.pt")
    with pytest.raises(RunError, match="does not fit its recipe"):
        resume(run.path, quiet=True)


def test_places_one_cannot_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(DropMaxError, match="file"):
            train(small(), place, quiet=True)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=r"cannot write .*environment\.json: No space left on device"):
        train(small(), tmp_path / "run", quiet=True)
    assert not list((tmp_path / "run").iterdir())


def test_runs_that_are_none_and_devices_that_are_not_there(tmp_path: Path, finished: Path) -> None:
    for call in (resume, load_model):
        with pytest.raises(RunError, match=r"dropmax train"):
            call(tmp_path / "nothing")
    run = RunDirectory.create(tmp_path / "run", small(), {})
    with pytest.raises(RunError, match="has not ended: resume it with `dropmax train --resume"):
        load_model(run.path)
    for content in (b"\x08" * 100, (finished / "model.safetensors").read_bytes()[:-10]):
        (run.path / "model.safetensors").write_bytes(content)
        with pytest.raises(RunError, match="damaged or not a model of dropmax"):
            load_model(run.path)
    with pytest.raises(InvalidValue, match="cannot use the device 'gpu'"):
        load_model(finished, device="gpu")
    with pytest.raises(InvalidValue, match="the device 'gpu' cannot be used here"):
        train(small(), tmp_path / "other", device="gpu", quiet=True)
