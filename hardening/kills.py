"""``kill -9`` at random moments of everything that writes; go on; compare the end with that of a run left in peace.

The moments are drawn uniformly from the time the work takes undisturbed. Work that was killed is begun again, as a
user would (``train --resume``, the same ``reproduce`` or ``report`` once more), and killed again, until it comes to its
end. Then every file it left must be one the undisturbed run left as well, with the same bytes; a temporary file nobody
owns any more is a file too many. In between, after each kill, no file may be there by half.

The same is done with a clock that goes backwards and with a disk that is full (``hardening/disks.py``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from dropmax.lab.experiments import Plan, plan_table, reproduce
from dropmax.workbench.progress import progress
from dropmax.workbench.recipes import Recipe, load_recipe
from dropmax.workbench.training import resume, train
from hardening.campaign import Outcome
from hardening.disks import fill_the_disk
from hardening.lives import live

#: Kills of the full and of the short form.
KILLS = {
    "training": (60, 3),
    "checkpointing": (40, 2),
    "training, clock set back": (15, 1),
    "report": (25, 1),
    "tuning, local engine": (30, 0),
    "reproduce, local engine": (24, 0),
    "reproduce, Ray engine": (6, 0),
}
FULL_DISKS = {"training": (20, 2), "reproduce, local engine": (3, 0)}

#: What differs between two runs that are the same: when, for how long, by which attempt.
_VOLATILE = ("seconds", "provenance", "resumed", "sha256")
_COMMIT = re.compile(rb"[0-9a-f]{40}(-dirty)?( \| [0-9a-f]{40}(-dirty)?)*")  # the tree may move on while we work


@dataclass(frozen=True)
class Target:
    """Some work that writes into a directory, begins or goes on, and can be killed."""

    name: str
    work: Callable[[Path], None]
    victim: str = ""  #: part of the command line of children that are killed now and then in its stead


def run(*, short: bool, seed: int, scratch: Path) -> Outcome:
    """Kill all that writes, some 200 times."""
    torch.set_num_threads(1)  # a fork takes no other threads along
    outcome = Outcome()
    numbers = {name: pair[short] for name, pair in KILLS.items()}
    if importlib.util.find_spec("ray") is None:
        outcome.count("left out: ray is not installed", numbers.pop("reproduce, Ray engine"))
    rng = random.Random(seed)
    trained = warmed_up(scratch)
    with progress("killing", sum(numbers.values()), "kills") as advance:
        for target in targets(trained, seed):
            if numbers.get(target.name):
                place = scratch / re.sub(r"\W+", "-", target.name)
                place.mkdir()
                with _surroundings(target, outcome):
                    kill_until_done(target, place, numbers[target.name], rng, outcome, advance)
                shutil.rmtree(place, ignore_errors=True)
        for target in targets(trained, seed):
            if number := FULL_DISKS.get(target.name, (0, 0))[short]:
                fill_the_disk(target, scratch / "disk", number, rng, outcome, contents, torn)
    outcome.details["kills"] = {name: outcome.counts.get(f"killed in {name}", 0) for name in numbers}
    outcome.details["clock"] = "time.time and time_ns of the process go back an hour a call; files are of tomorrow"
    return outcome


def warmed_up(scratch: Path) -> Path:
    """Do everything once, so that those that are forked need not: digits, imports, torch's own first time."""
    import dropmax.lab.report
    from dropmax.lab.figures.runs import load_runs

    trained = train(tiny_recipe(epochs=2), scratch / "trained", quiet=True).path
    dropmax.lab.report.make_report(load_runs([trained], None), "warming up")
    return trained


def targets(trained: Path, seed: int) -> Iterator[Target]:
    """Return what is to be killed; ``trained`` is a run to report on."""
    worker = "dropmax.lab.experiments.worker"
    training = functools.partial(_train, tiny_recipe(epochs=12, seed=seed))
    yield Target("training", training)
    yield Target("checkpointing", functools.partial(_train, tiny_recipe(epochs=40, seed=seed, train_size=10)))
    yield Target("training, clock set back", functools.partial(_with_clock_set_back, training))
    yield Target("report", functools.partial(_report, trained))
    tuning = tiny_plan(heads=["dropmax"], runs=1, tune=True)
    yield Target("tuning, local engine", functools.partial(_reproduce, tuning, engine="local", workers=1), worker)
    table = tiny_plan(heads=["softmax", "dropmax"], runs=2, tune=False)
    yield Target("reproduce, local engine", functools.partial(_reproduce, table, engine="local", workers=2), worker)
    yield Target("reproduce, Ray engine", functools.partial(_reproduce, table, engine="ray"))


def kill_until_done(
    target: Target,
    scratch: Path,
    number: int,
    rng: random.Random,
    outcome: Outcome,
    advance: Callable[[int], None] = lambda step: None,
) -> None:
    """Kill a target so many times, going on after each, and compare every run that ends with one left in peace."""
    reference = scratch / "reference"
    whole = live(functools.partial(target.work, reference))
    if not whole.done:
        outcome.count("wrong without any kill")
        outcome.fail(f"{target.name}: undisturbed, {whole.error}")
        return
    expected = contents(reference)
    left, run_index, kills = number, 0, 0
    while left > 0 or kills:
        place = scratch / f"run{run_index}"
        moment = rng.uniform(0, whole.seconds) if left > 0 else None
        victim = rng.choice([target.victim, ""])
        life = live(functools.partial(target.work, place), kill_after=moment, victim=victim)
        if life.kills:
            left, kills = left - 1, kills + 1
            outcome.count(f"killed in {target.name}")
            advance(1)
            _into_the_future(place)
            for line in torn(place):
                outcome.count("half-written")
                outcome.fail(f"{target.name}: killed {kills} times, the last after {moment:.3f} s: {line}")
        if life.done:
            problems = differences(contents(place), expected)
            outcome.count("ended in other bytes" if problems else "ended in the same bytes")
        elif life.error:
            problems = [life.error]
            outcome.count("could not go on")
        else:
            continue
        for line in problems:
            outcome.fail(f"{target.name}: after {kills} kills, {line}")
        shutil.rmtree(place, ignore_errors=True)
        run_index, kills = run_index + 1, 0


def contents(place: Path) -> dict[str, bytes]:
    """Return every file by name, without what may differ."""
    found = {}
    for path in sorted(place.rglob("*")):
        if path.is_file():
            data = path.read_bytes()
            if path.name == "environment.json":
                data = b"when and where"
            elif path.name == "results.jsonl":
                rows = [json.loads(line) for line in data.splitlines()]  # in the order in which the runs ended
                kept = [json.dumps({k: v for k, v in row.items() if k not in _VOLATILE}) for row in rows]
                data = "\n".join(sorted(kept)).encode()
            elif path.name == "runs.csv":
                data = b"as results.jsonl"
            elif path.suffix == ".md":
                data = _COMMIT.sub(b"COMMIT", data)
            found[str(path.relative_to(place))] = data
    return found


def differences(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    """Say in what two directories differ."""
    return (
        [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
        + [f"{name} was left behind" for name in sorted(found.keys() - expected.keys())]
        + [
            f"{name} has other bytes"
            for name in sorted(found.keys() & expected.keys())
            if found[name] != expected[name]
        ]
    )


def torn(place: Path) -> list[str]:
    """Say which files are there by half; those that begin with a dot are temporary and not looked at."""
    problems = []
    for path in sorted(place.rglob("*")):
        if not path.is_file() or path.name.startswith("."):
            continue
        try:
            if path.suffix == ".json":
                json.loads(path.read_bytes())
            elif path.name == "results.jsonl":  # whose last line may be cut: the next writer removes it
                [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
            elif path.suffix == ".jsonl":
                [json.loads(line) for line in path.read_text().splitlines()]
            elif path.suffix == ".safetensors":
                safetensors.torch.load(path.read_bytes())
            elif path.suffix == ".pt":
                torch.load(path, weights_only=True)
            elif path.suffix == ".toml":
                load_recipe(path)
            elif path.suffix == ".html" and not path.read_text().rstrip().endswith("</html>"):
                raise ValueError("it has no end")
        except FileNotFoundError:  # a worker that outlived its driver for a moment has moved it
            continue
        except Exception as error:
            problems.append(f"{path.relative_to(place)} is there by half: {error}")
    return problems


# --- the work ----------------------------------------------------------------------------------------------------


def tiny_recipe(epochs: int, seed: int = 0, train_size: int = 100) -> Recipe:
    """Return a recipe of a fraction of a second that saves a checkpoint after every epoch."""
    return load_recipe("mnist-1k").override(
        {
            "network.name": "mlp",
            "training.epochs": epochs,
            "training.batch_size": 50,
            "training.seed": seed,
            "training.validate_every": 4,
            "training.checkpoint_seconds": 0.0,
            "data.train_size": train_size,
            "data.validation_size": 50,
        }
    )


def tiny_plan(heads: list[str], runs: int, tune: bool) -> Plan:
    """Return a plan of tiny runs; with ``tune`` it has three grid points a head."""
    tables = tiny_recipe(epochs=10).to_dict()
    overrides = {f"{table}.{key}": tables[table][key] for table, key in _OVERRIDDEN}
    return plan_table(["mnist-1k"], heads=heads, runs=runs, tune=tune, overrides=overrides)


_OVERRIDDEN = (
    ("network", "name"),
    ("training", "epochs"),
    ("training", "batch_size"),
    ("training", "validate_every"),
    ("training", "checkpoint_seconds"),
    ("training", "weight_decay"),
    ("data", "train_size"),
    ("data", "validation_size"),
)


def _train(recipe: Recipe, place: Path) -> None:
    """``dropmax train --resume``, or ``--force`` where not even the recipe had been written."""
    if (place / "recipe.toml").exists():
        resume(place, quiet=True)
    else:
        train(recipe, place, quiet=True, force=True)


def _reproduce(plan: Plan, place: Path, **options: Any) -> None:
    reproduce(plan, place, quiet=True, command="python -m hardening kills", modes=["mean"], **options)


def _report(trained: Path, place: Path) -> None:
    from dropmax.cli.report import report

    place.mkdir(exist_ok=True)
    os.chdir(place)  # so that the command, which the page quotes, is the same everywhere
    sys.argv = ["dropmax", "report", "the-run", "--out", "report.html"]
    report([trained], out=Path("report.html"), force=True, threads=1)


def _with_clock_set_back(work: Callable[[Path], None], place: Path) -> None:
    """Work while somebody turns the clock back by an hour each time we look at it."""
    now, looks = time.time(), 0

    def back() -> float:
        nonlocal looks
        looks += 1
        return now - 3600.0 * looks

    time.time = back
    time.time_ns = lambda: int(1e9 * back())
    work(place)


def _into_the_future(place: Path) -> None:
    """Let files be of tomorrow, as they are to a process after the clock was set back; ours must not care."""
    tomorrow = time.time() + 86_400
    for path in place.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, (tomorrow, tomorrow))


@contextlib.contextmanager
def _surroundings(target: Target, outcome: Outcome) -> Iterator[None]:
    """Start the Ray cluster a target needs, and see that its tasks leave nothing on the node."""
    if "Ray" not in target.name:
        yield
        return
    from hardening.rays import ray_cluster

    with ray_cluster() as node:
        yield
        for left in node.glob("dropmax-*"):
            outcome.count("left on the node")
            outcome.fail(f"{target.name}: {left.name} was left behind on the node")
