"""The Ray engine on a real cluster of two nodes, one of which is killed in mid-run."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dropmax.errors import DropMaxError, MissingDependency
from dropmax.lab.experiments import Store, plan_table, reproduce
from dropmax.lab.experiments.engines import Cluster, _scratch
from dropmax.lab.experiments.worker import run_job

HAS_RAY = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason='ray is not installed: pip install "dropmax[ray]"')


@pytest.mark.skipif(HAS_RAY, reason="ray is installed")
def test_without_ray_the_extra_is_named() -> None:
    with pytest.raises(MissingDependency, match=r'--engine ray needs ray.*pip install "dropmax\[ray\]"'):
        Cluster().size()


@needs_ray
def test_no_cluster_is_an_error_that_says_how_to_start_one() -> None:
    with pytest.raises(DropMaxError, match="ray start --head"):
        Cluster("127.0.0.1:1").size()


@needs_ray
def test_a_node_that_dies_costs_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    from ray.cluster_utils import Cluster as TwoNodes

    # Nodes are started from here and inherit this: where tasks keep their scratch directories, and where dropmax is.
    # Ray puts sockets there, whose paths must be short.
    scratch = Path(tempfile.mkdtemp(prefix="dm", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3] / "src"))
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    tiny = {"training.epochs": 40, "data.train_size": 300, "data.validation_size": 100}
    plan = plan_table(["mnist-1k"], heads=["softmax", "dropmax"], runs=2, tune=False, overrides=tiny)
    out = tmp_path / "out"
    small: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    quick_to_notice = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
    cluster = TwoNodes(initialize_head=True, head_node_args=small | {"_system_config": quick_to_notice})
    try:
        doomed = cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        cluster.wait_for_nodes()

        def kill_one() -> None:
            # After the first two of four runs the other two have just begun: none is about to end when its node dies.
            while len(Store(out).runs()) < 2 or len(list(scratch.glob("dropmax-*/run"))) < 2:
                time.sleep(0.02)
            cluster.remove_node(doomed, allow_graceful=False)

        killer = threading.Thread(target=kill_one, daemon=True)
        killer.start()
        outcome = reproduce(plan, out, engine=Cluster(cluster.address), quiet=True)
        killer.join(20)
        assert not killer.is_alive(), "no node was killed"
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert (outcome.done, outcome.failed) == (4, {})
    shutil.rmtree(scratch, ignore_errors=True)
    assert sorted(result.seed for result in Store(out).runs()) == [0, 0, 1, 1]
    assert not (out / "work").exists()
    assert (out / "tables.md").exists()
    # The engine makes no difference to the numbers.
    here = run_job(plan.groups[0].run_jobs({}, 1)[0], tmp_path / "here")
    there = next(found for found in Store(out).runs() if found.job == here.job)
    assert (there.test, there.validation) == (here.test, here.validation)


def test_a_task_removes_what_killed_tasks_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, stranger = tmp_path / "dropmax-task-dead", tmp_path / "dropmax-task-stranger"
    for place in (left / "run", stranger / "run"):
        place.mkdir(parents=True)
    (left / ".lock").touch()
    with _scratch() as mine:
        assert not left.exists()
        assert stranger.exists()  # it has no lock: nobody knows whose it is
        with _scratch() as other:
            assert mine.exists()
            assert other != mine
        assert not other.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["dropmax-task-stranger"]
