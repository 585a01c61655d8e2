"""The same seed, the same bytes: in another process, with more threads, and with a save and a load in the middle.

Every head is trained on a few digits with two networks, and asked for predictions in every mode. A digest of the
weights, of the log and of the predictions is what must be the same

- in two processes that know nothing of each other (new ones, not forks),
- in a process with two threads: torch splits some sums between threads, and then the last bits differ. Which heads,
  networks and modes do is measured and listed, not held against anybody; a third process with two threads must agree
  with the first of them, though,
- for a run that is interrupted in the middle, saved, and gone on with (in the full form by another process),
- for a model that was saved and loaded, against the one that was saved.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dropmax.errors import RunError
from dropmax.workbench.progress import progress
from hardening.campaign import Outcome

#: With small tensors torch uses one thread whatever it may; these have some that are large enough.
NETWORKS = ("mlp", "lenet", "tutorial-cnn", "small-cnn")
SHORT_NETWORKS = ("mlp",)
SHORT_HEADS = ("sampled-softmax", "dropmax-qp", "dropmax")  # those that draw noise, each in its own way

Digests = dict[str, dict[str, str]]  #: case -> what -> digest


def run(*, short: bool, seed: int, scratch: Path) -> Outcome:
    """Train every head again and again, and compare digests."""
    from dropmax.heads import ABLATIONS, HEADS

    networks = SHORT_NETWORKS if short else NETWORKS
    heads = SHORT_HEADS if short else (*HEADS, *ABLATIONS)
    size = 60 if short else 200
    cases = [[head, network] for network in networks for head in heads]
    shared = {"cases": cases, "seed": seed, "train_size": size, "epochs": 2 if short else 3}
    processes: dict[str, dict[str, Any]] = {
        "one thread": {"threads": 1},
        "another process": {"threads": 1},
        "two threads": {"threads": 2},
        "two threads again": {"threads": 2},
        "killed in the middle": {"threads": 1, "stop_after": 2},
        "gone on with": {"threads": 1, "resume_from": "killed in the middle"},
    }
    if short:  # the fewest processes that show it: torch takes seconds to load
        processes = {name: processes[name] for name in ("one thread", "two threads", "gone on with")}
        processes["gone on with"] = {"threads": 1, "stop_after": 2, "go_on": True}
    found: dict[str, Digests] = {}
    with progress("training again and again", len(processes), "processes") as advance:
        for name, options in processes.items():
            found[name] = in_new_process({**shared, **options, "place": str(scratch / name)}, scratch)
            advance(1)
    outcome = Outcome()
    compare("save and load in the middle", found["one thread"], found["gone on with"], outcome)
    if not short:
        compare("another process", found["one thread"], found["another process"], outcome)
        compare("another process of two threads", found["two threads"], found["two threads again"], outcome)
    check_loaded(found["one thread"], outcome)
    outcome.details["differs between one and two threads"] = tabulate(
        found["one thread"], found["two threads"], outcome
    )
    return outcome


def compare(what: str, expected: Digests, actual: Digests, outcome: Outcome) -> None:
    """Count the cases of which everything is the same, and note those of which something is not."""
    for case, digests in expected.items():
        different = [name for name, digest in digests.items() if actual[case][name] != digest]
        outcome.count(f"{what}: other bytes" if different else f"{what}: the same bytes")
        if different:
            outcome.fail(f"{case}: {what} changes {', '.join(different)}")


def check_loaded(found: Digests, outcome: Outcome) -> None:
    """See that a model predicts after a save and a load what it predicted before."""
    for case, digests in found.items():
        same = all(digests[name] == digests[f"{name}, loaded"] for name in digests if f"{name}, loaded" in digests)
        outcome.count("a saved and loaded model: the same bytes" if same else "a saved and loaded model: other bytes")
        if not same:
            outcome.fail(f"{case}: a model that was saved and loaded predicts other bytes")


def tabulate(one: Digests, two: Digests, outcome: Outcome) -> dict[str, list[str]]:
    """Return, for each case that the number of threads changes, what it changes; no promise is made about these."""
    table = {}
    for case, digests in one.items():
        different = [name for name, digest in digests.items() if two[case][name] != digest]
        outcome.count("two threads: other bytes (no promise)" if different else "two threads: the same bytes")
        if different:
            table[case] = different
    return table


def in_new_process(options: Mapping[str, Any], scratch: Path) -> Digests:
    """Run :func:`train_all` in a Python of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(options["threads"]), "MKL_NUM_THREADS": str(options["threads"])}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        [sys.executable, "-c", "import hardening.determinism; hardening.determinism.main()"],
        input=json.dumps(dict(options)),
        capture_output=True,
        text=True,
        env=environment,
        cwd=scratch,
    )
    if ended.returncode:
        raise RunError(f"a process of the campaign ended with {ended.returncode}: {ended.stderr.strip()[-300:]}")
    digests: Digests = json.loads(ended.stdout.splitlines()[-1])
    return digests


def main() -> None:
    """Read options from standard input, train, and print digests."""
    options = json.load(sys.stdin)
    threads = options.pop("threads")
    import torch

    torch.set_num_threads(threads)
    print(json.dumps(train_all(**options)))


def train_all(
    cases: Iterable[tuple[str, str]],
    seed: int,
    train_size: int,
    epochs: int,
    place: str,
    stop_after: int = 0,
    resume_from: str = "",
    go_on: bool = False,
) -> Digests:
    """Train every case, or go on with it; return digests.

    At the end of epoch ``stop_after`` training is interrupted, and leaves the checkpoint before that; ``go_on`` goes on
    from there at once, ``resume_from`` in another process.
    """
    from dropmax.workbench.recipes import load_recipe
    from dropmax.workbench.training import Interrupted, resume, train

    found = {}
    for head, network in cases:
        recipe = load_recipe("mnist-1k").override(
            {
                "head.name": head,
                "network.name": network,
                "training.epochs": epochs,
                "training.seed": seed,
                "training.batch_size": 50 if train_size < 100 else 100,
                "data.train_size": train_size,
                "data.validation_size": 100,
            }
        )
        case = f"{network}, {head}"
        if resume_from:
            run = resume(Path(place).with_name(resume_from) / case, quiet=True)
        else:
            watch = [_Stop(stop_after)] if stop_after else []
            try:
                run = train(recipe, Path(place) / case, quiet=True, callbacks=watch)
            except Interrupted:
                if not go_on:
                    continue
                run = resume(Path(place) / case, quiet=True)
        found[case] = _digests(run.path, seed)
    return found


class _Stop:
    """Press Ctrl-C in the middle of training."""

    def __init__(self, epoch: int) -> None:
        self.after = epoch

    def start(self, run: Path, recipe: Any, environment: dict[str, Any]) -> None:
        pass

    def epoch(self, row: dict[str, Any]) -> None:
        if row["epoch"] == self.after:
            raise KeyboardInterrupt

    def end(self, metrics: dict[str, Any] | None) -> None:
        pass


def _digests(path: Path, seed: int) -> dict[str, str]:
    """Return digests of what a run left, and of what its model says in every mode, before and after another save."""
    import torch

    from dropmax.heads import MODES
    from dropmax.workbench.data import Split
    from dropmax.workbench.evaluation import predict
    from dropmax.workbench.training import load_data, load_model, save_model

    def digest(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()[:16]

    found = {name: digest((path / name).read_bytes()) for name in ("model.safetensors", "metrics.jsonl")}
    trained = load_model(path)
    data = load_data(trained.recipe)
    some = Split(data.test.inputs[:200], data.test.labels[:200])
    again = path.with_name(path.name + ".again.safetensors")
    save_model(again, trained.model, trained.recipe, data)
    for suffix, model in (("", trained), (", loaded", load_model(again))):
        for mode in MODES:
            generator = torch.Generator().manual_seed(seed)
            answers = predict(model.model, model.batches(some), mode=mode, samples=20, generator=generator)
            found[f"predictions ({mode}){suffix}"] = digest(answers.probs.numpy().tobytes())
    again.unlink()
    return found
