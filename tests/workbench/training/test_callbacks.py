"""Logs: the numbers arrive, go on after an interruption, and can neither lose a run nor change it."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dropmax.errors import DropMaxError, MissingDependency
from dropmax.workbench.recipes import Recipe, load_recipe
from dropmax.workbench.training import Callback, MLflow, RunDirectory, TensorBoard, WandB, resume, train
from dropmax.workbench.training.callbacks import make_callbacks, scalars

EPOCHS = 3


def small() -> Recipe:
    values = {
        "training.epochs": EPOCHS,
        "training.validate_every": 2,
        "training.checkpoint_seconds": 0.0,
        "training.batch_size": 50,
        "data.train_size": 100,
        "data.validation_size": 100,
        "network.name": "mlp",
        "network.hidden": [8],
    }
    return load_recipe("mnist-1k").override(values)


def contents(run: Path) -> list[bytes]:
    return [(run / name).read_bytes() for name in ("metrics.jsonl", "model.safetensors")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without any log."""
    return train(small(), tmp_path_factory.mktemp("runs") / "plain", quiet=True).path


class Recorder(Callback):
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def start(self, run: Path, recipe: Recipe, environment: dict[str, Any]) -> None:
        self.calls.append(("start", (run, recipe.head["name"], environment["command"])))

    def epoch(self, row: dict[str, Any]) -> None:
        self.calls.append(("epoch", row))

    def end(self, metrics: dict[str, Any] | None) -> None:
        self.calls.append(("end", metrics))


class Stopper(Recorder):
    """Interrupts after the first epoch, as Ctrl-C would."""

    def epoch(self, row: dict[str, Any]) -> None:
        super().epoch(row)
        raise KeyboardInterrupt


class Gambler:
    """Derives from nothing, has one method only, draws random numbers, and tampers with what it is shown."""

    epochs = 0

    def epoch(self, row: dict[str, Any]) -> None:
        self.epochs += 1
        torch.manual_seed(123)
        torch.rand(10)
        row["train"].clear()
        row["epoch"] = -1


class Broken(Recorder):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def __getattribute__(self, name: str) -> Any:
        if name in ("start", "epoch", "end") and name == object.__getattribute__(self, "where"):
            raise ConnectionError("the server is\nnot there")
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("where", ["start", "epoch", "end"])
def test_a_callback_that_raises_costs_a_line_and_not_the_run(
    where: str, plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, after = Broken(where), Recorder()
    run = train(small(), tmp_path / "run", quiet=True, callbacks=[broken, after])
    assert contents(run.path) == contents(plain)
    assert len(after.calls) == EPOCHS + 2, "the one behind it was not told"
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines == ["dropmax: Broken failed and gets no more calls: ConnectionError: the server is not there"]


class Steps(Recorder):
    """Looks at steps too, and stops after one of them if told to."""

    def __init__(self, stop_after: int = 0) -> None:
        super().__init__()
        self.stop_after = stop_after

    def step(self, step: int, terms: dict[str, float]) -> None:
        self.calls.append(("step", (step, dict(terms))))
        terms.clear()
        torch.rand(3)
        if step == self.stop_after:
            raise KeyboardInterrupt


def test_a_callback_is_told_of_everything_and_changes_nothing(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gambler: Any = Gambler()
    steps = Steps()
    run = train(small(), tmp_path / "run", quiet=True, callbacks=[gambler, steps])
    assert contents(run.path) == contents(plain)
    assert gambler.epochs == EPOCHS
    assert capsys.readouterr().err == ""
    others = [(name, about) for name, about in steps.calls if name != "step"]
    assert [name for name, _ in others] == ["start", *["epoch"] * EPOCHS, "end"]
    assert others[0][1][:2] == (run.path, "dropmax")
    assert [row for name, row in others if name == "epoch"] == run.metrics()
    assert others[-1][1] == run.metrics()[-1]
    told = [about for name, about in steps.calls if name == "step"]
    assert [number for number, _ in told] == list(range(1, 2 * EPOCHS + 1))
    for row in run.metrics():
        both = [terms for number, terms in told if row["step"] - 2 < number <= row["step"]]
        for name, value in row["train"].items():
            assert sum(terms[name] for terms in both) / 2 == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_run_stopped_after_any_step_ends_with_the_same_bytes(stop_after: int, plain: Path, tmp_path: Path) -> None:
    stopped, steps = Steps(stop_after), Steps()
    with pytest.raises(DropMaxError, match="stopped after"):
        train(small(), tmp_path / "run", quiet=True, callbacks=[stopped])
    assert stopped.calls[-1] == ("end", None)
    state = RunDirectory(tmp_path / "run").load_checkpoint()
    assert state is not None
    assert 2 * state["epoch"] + state["step"] == stop_after  # an epoch has two steps
    resume(tmp_path / "run", quiet=True, callbacks=[steps])
    assert contents(tmp_path / "run") == contents(plain)
    assert [about[0] for name, about in steps.calls if name == "step"] == list(range(stop_after + 1, 2 * EPOCHS + 1))
    assert steps.calls[0] == stopped.calls[0], "it is told of the same environment"


# --- the three logs, read back -----------------------------------------------------------------------------------


def stop_and_go_on(log: type[Any], run: Path, **options: Any) -> dict[int, dict[str, float]]:
    """Train with a log, stop after its first epoch and lose the checkpoint, resume; return what the log should hold.

    The first epoch is so done twice, as after a kill between two checkpoints.
    """
    with pytest.raises(DropMaxError, match="stopped after"):
        train(small(), run, quiet=True, callbacks=[log(**options), Stopper()])
    for checkpoint in RunDirectory(run).checkpoints():
        checkpoint.unlink()
    resume(run, quiet=True, callbacks=[log(**options)])
    return {row["epoch"]: scalars(row) for row in RunDirectory(run).metrics()}


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    wanted = stop_and_go_on(TensorBoard, tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    _assert_close(by_epoch({name: events.Scalars(name) for name in events.Tags()["scalars"]}), wanted, 1e-6)


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    store = (tmp_path / "store").as_uri()
    wanted = stop_and_go_on(MLflow, tmp_path / "run", tracking_uri=store, experiment="digits")
    client = mlflow.MlflowClient(tracking_uri=store)
    (run,) = client.search_runs([client.get_experiment_by_name("digits").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["head.name"] == "dropmax"
    assert run.data.params["training.epochs"] == str(EPOCHS)
    points = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    _assert_close(by_epoch(points), wanted, 0)


def by_epoch(curves: dict[str, list[Any]]) -> dict[int, dict[str, float]]:
    """Return the values of the points of some curves by epoch, each of which must be there once."""
    found: dict[int, dict[str, float]] = {}
    for name, points in curves.items():
        assert len({point.step for point in points}) == len(points), "an epoch is there twice"
        for point in points:
            found.setdefault(point.step, {})[name] = point.value
    return found


def test_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    wanted = stop_and_go_on(WandB, tmp_path / "run", mode="offline")
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    found: dict[int, dict[str, float]] = {}
    runs = set()
    for file in files:
        for record in wandb_records(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                runs.add((record.run.run_id, record.run.project, record.run.display_name))
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                if config.get("head"):
                    assert config["head"]["name"] == "dropmax"
            if kind == "history":
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                step = items.pop("_step")
                found[step] = {name: value for name, value in items.items() if not name.startswith("_")}
    assert len(files) == 2
    assert len(runs) == 1, "the resumed part belongs to another run"
    _assert_close(found, wanted, 0)


def wandb_records(file: Path) -> Iterator[Any]:
    """Read W&B's file: after a header of 7 bytes a log as LevelDB writes them, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = file.read_bytes(), 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def _assert_close(found: dict[int, dict[str, float]], wanted: dict[int, dict[str, float]], relative: float) -> None:
    assert set(found) == set(wanted) == {1, 2, 3}
    for epoch, values in wanted.items():
        assert found[epoch] == pytest.approx(values, rel=relative, abs=0), epoch


def test_making_logs_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [type(log) for log in make_callbacks(["tensorboard", "tensorboard"])] == [TensorBoard]
    with pytest.raises(DropMaxError, match=r"unknown log 'wndb': did you mean 'wandb'\?"):
        make_callbacks(["wndb"])
    for name, module in {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow", "wandb": "wandb"}.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingDependency, match=rf'"dropmax\[{name}\]"'):
            make_callbacks([name])


def test_a_missing_log_is_known_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingDependency):
        train(small(), tmp_path / "run", tensorboard=True, quiet=True)
    assert not list(tmp_path.iterdir())
