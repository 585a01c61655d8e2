"""Settings of every test process: threads, instruction sets, seeds and, when asked for, misaligned memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

# Some virtual machines announce AMX and then die of it (SIGILL) in a bfloat16 product. oneDNN reads this once, early.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# One thread per process: two processes share two cores. Commands that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from tests import command
from tests.misaligned import Misaligned

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# No deadline: the machine that runs the tests may be busy. Derandomised: a red build can be run again.
settings.register_profile("dropmax", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("portable", deadline=None, derandomize=True, max_examples=10)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dropmax"))

#: Inductor generates vector code that does not compile where ATen is told to use none, and copies misaligned inputs.
NO_INDUCTOR = os.environ.get("ATEN_CPU_CAPABILITY") == "default" or os.environ.get("DROPMAX_TEST_MISALIGNED") == "1"

#: Tests that compare computed numbers: ``make test-portable`` runs them again as on other processors.
NUMERICAL = (
    *("tests/heads", "tests/exact", "tests/workbench/networks", "tests/workbench/test_e", "tests/workbench/test_hub"),
    *("tests/test_walk", "tests/test_classifier", "tests/test_functional", "tests/test_metrics"),
    *("tests/test_objective", "tests/test_packed", "tests/test_topk", "tests/lab/test_diagnostics"),
    *("tests/estimator/test_sklearn_rows", "tests/lab/figures/test_numbers"),
)
#: Tests that need ray, lightning, transformers, skorch, a logging service, a browser, the site or a build.
HEAVY = (
    *("tests/test_packaging.py", "tests/lab/explorer/test_browser.py"),
    *(
        f"tests/workbench/training/test_callbacks.py::test_{name}"
        for name in ("tensorboard", "mlflow", "wandb", "making")
    ),
    "tests/workbench/training/test_loop.py::test_tensorboard",
    "tests/cli/test_export_cli.py::test_train_with_logs",
    "tests/docs/test_pages.py::test_the_site",
    *(
        f"tests/docs/test_pages.py::test_every_python_block_of_a_page_runs[{page}]"
        for page in ("integrations", "logging")
    ),
    *(f"tests/lab/experiments/test_cluster.py::test_{name}" for name in ("no_cluster", "a_node")),
)
#: Tests of many seconds beside faster ones of the same thing: several processes, kills, whole trainings.
SLOW = (
    "tests/slow/",
    *(
        f"tests/workbench/training/test_loop.py::test_{name}"
        for name in (
            "two_processes",
            "after_kill_9",
            "ctrl_c_ends_with_a_checkpoint_and_says_how_to_go_on[15]",
            "compiled",
        )
    ),
    "tests/estimator/test_sklearn.py::test_scikit_learn_checks[DropMaxClassifier(max_iter",  # the other is trained less
    "tests/lab/experiments/test_reproduce.py::test_stopped_and_killed",
    "tests/lab/experiments/test_reproduce.py::test_a_worker_that_is_killed",
    "tests/lab/experiments/test_reproduce.py::test_a_study_with_a_diverging",
    "tests/test_portability.py::test_it_works",
    "tests/test_sharding.py::test_sharded_heads_do_what_whole_heads_do[4]",
    "src/dropmax/lab/results.py::dropmax.lab.results",
    "src/dropmax/workbench/hub.py::dropmax.workbench.hub.save_pretrained",
)
HEAVY_EXAMPLES = ("skorch_net", "lightning_module", "huggingface_trainer", "huggingface_tokens")


#: It drives the browser of heavy tests; without aiohttp it cannot even be searched for doctests.
collect_ignore = [] if find_spec("aiohttp") else ["lab/explorer/cdp.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they need, and skip what the setting of ``make test-portable`` cannot run."""
    skip = pytest.mark.skip(reason="compiles with inductor, which this setting does not allow")
    for item in items:
        name = item.nodeid
        if name.startswith(NUMERICAL):
            item.add_marker("numerical")
        if name.startswith(SLOW):
            item.add_marker("slow")
        if name.startswith(HEAVY) or (name.startswith("tests/examples") and any(one in name for one in HEAVY_EXAMPLES)):
            item.add_marker("heavy")
        if NO_INDUCTOR and item.get_closest_marker("inductor"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    if os.environ.get("DROPMAX_TEST_MISALIGNED") == "1":
        with Misaligned():
            yield
    else:
        yield


@pytest.fixture(scope="session")
def dropmax() -> command.Run:
    """The command-line tool, as a user calls it."""
    return command.dropmax


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small trained run, for tests that only read it."""
    from dropmax.workbench.recipes import load_recipe
    from dropmax.workbench.training import train

    path = tmp_path_factory.mktemp("trained") / "run"
    values = {"training.epochs": 10, "data.validation_size": 100}
    train(load_recipe("mnist-1k").override(values), path, quiet=True)
    return path
