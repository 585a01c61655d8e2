"""Mutation testing: change one thing in a formula, and see whether a test notices.

All mutants take hours. So the full form judges a sample of each file (:data:`SAMPLE`), drawn with the seed, for at most
``HARDEN_MUTANTS_SECONDS`` (default 1200), and keeps every verdict in :data:`VERDICTS`: the next run goes on where this
one stopped, and judges again only what changed: all mutants of a changed source, survivors of changed tests.
Survivors that cannot be killed, as the change makes no difference, are explained in ``survivors.toml``, and counted
apart.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from dropmax.errors import DataError, InvalidValue
from dropmax.workbench.progress import progress
from hardening.campaign import Outcome
from hardening.mutation import Mutant, fingerprint, mutants

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
VERDICTS = ROOT / "results" / "reliability" / "mutants.jsonl"
EXPLAINED = Path(__file__).with_name("survivors.toml")

HEADS = ["heads/test_heads.py", "heads/test_bad_input.py"]
#: Which tests judge the mutants of a file, the quickest first.
TESTS: dict[str, list[str]] = {
    "functional.py": ["test_functional.py", "test_objective.py", *HEADS, "heads/test_precision.py"],
    "objective.py": ["test_objective.py", *HEADS, "heads/test_precision.py"],
    "exact/__init__.py": ["exact/test_calls.py", "exact/test_values.py", "exact/test_gradients.py"],
    "exact/autograd.py": ["exact/test_calls.py", "exact/test_gradients.py", "heads/test_exact_heads.py"],
    "exact/kernels.py": ["exact/test_gradients.py", "exact/test_values.py", "exact/test_calls.py"],
    "exact/portable.py": ["exact/test_portable.py"],
    "exact/quadrature.py": ["exact/test_gradients.py", "exact/test_values.py", "exact/test_calls.py"],
    "heads/ablations.py": ["heads/test_ablations.py"],
    "heads/base.py": [*HEADS, "test_prediction.py", "heads/test_transforms.py"],
    "heads/deterministic.py": [*HEADS, "heads/test_exact_heads.py", "heads/test_precision.py"],
    "heads/dropmax.py": [*HEADS, "heads/test_exact_heads.py", "test_blocked.py"],
    "heads/dropmax_qp.py": [*HEADS, "heads/test_exact_heads.py"],
    "heads/masked.py": ["heads/test_exact_heads.py", *HEADS, "test_prediction.py", "heads/test_precision.py"],
    "heads/options.py": HEADS,
    "heads/random_dropmax.py": HEADS,
    "heads/sampled_softmax.py": HEADS,
    "heads/sparsemax.py": HEADS,
}

#: Mutants of each file in the full form; of the equations, all.
SAMPLE = {"functional.py": 10_000}
SAMPLE_OTHERS = 40
#: Tests that take long are tried only on mutants that survive the others.
SLOW = " or ".join(
    [
        "closed_form_optimum",
        "compiles",
        "compile_without",
        "separable",
        "memory",
        "twelve",
        "export",
        "100000",
        "spreads_of_ten_thousand",
    ]
)
#: Seconds of work a mutant may take in either.
SECONDS_PER_MUTANT = 120.0
#: Of each property that Hypothesis tests; a wrong formula seldom needs more.
EXAMPLES = 10
#: The position of a verdict on the source as it is: its tests passed.
UNCHANGED = -1
#: What the short form judges, and with which tests.
SHORT = {"functional.py": ["test_functional.py"]}
SHORT_SAMPLE = 2


class Verdict(NamedTuple):
    """What became of a mutant."""

    file: str
    fingerprint: str  # of the source
    position: int
    tests: str  # fingerprint of the tests
    line: int
    code: str  # the source line
    before: str
    after: str
    verdict: str  # "killed", "killed by time", "survived"
    seconds: float  # of work


class Worker:
    """A process of :mod:`hardening.mutation_worker`."""

    def __init__(self, scratch: Path) -> None:
        self.log = scratch / "mutant.log"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hardening.mutation_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise DataError(f"the process that judges mutants ended with code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, file: str, source: str, tests: list[str]) -> tuple[int | None, float]:
        """Return pytest's exit code on a source, None where it took too long, and how long it took."""
        module = "dropmax." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        job = {
            "module": module,
            "path": str(ROOT / "src" / "dropmax" / file),
            "source": source,
            "tests": tests,
            "seconds": SECONDS_PER_MUTANT,
            "examples": EXAMPLES,
            "log": str(self.log),
        }
        if self.process.stdin is None:
            raise DataError("the process that judges mutants takes no input")
        print(json.dumps(job), file=self.process.stdin, flush=True)
        answer = self._answer()
        return answer["exit"], answer["seconds"]

    def judge(self, file: str, source: str, tests: list[str], slow: bool = True) -> tuple[str, float]:
        """Run the quick tests, then the slow ones, until one fails."""
        paths = [f"tests/{name}" for name in tests]
        seconds = 0.0
        for which in (f"not ({SLOW})", SLOW)[: 1 + slow]:
            code, took = self.ask(file, source, ["-k", which, *paths])
            seconds += took
            if code is None:
                return "killed by time", seconds
            if code in (1, 2, 3) or code < 0:  # a failure, a module that cannot be imported, a crash
                return "killed", seconds
            if code not in (0, 5):  # passed, or no test of this kind
                log = self.log.read_text(errors="replace")[-500:]
                raise DataError(f"pytest ended with {code} on {file}: {log}")
        return "survived", seconds

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        self.process.kill()
        self.process.wait()


def fingerprint_of_tests(tests: list[str]) -> str:
    """Name the tests by what they say."""
    text = b"".join((ROOT / "tests" / name.split("::")[0]).read_bytes() for name in tests)
    return hashlib.sha256(text).hexdigest()[:16]


def read_verdicts(path: Path) -> dict[tuple[str, str, int], Verdict]:
    """Return the verdicts so far; a line cut short by a kill is left out."""
    found: dict[tuple[str, str, int], Verdict] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            verdict = Verdict(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[verdict.file, verdict.fingerprint, verdict.position] = verdict
    return found


def explanations(path: Path = EXPLAINED) -> dict[tuple[str, str, str, str], str]:
    """Return why some mutants cannot be killed, by file, source line, and what became what."""
    table = tomllib.loads(path.read_text())
    found = {}
    for entry in table.get("survivor", []):
        if set(entry) != {"file", "code", "before", "after", "why"} or not entry["why"].strip():
            raise DataError(f"{path}: a survivor needs file, code, before, after and why, got {sorted(entry)}")
        found[entry["file"], entry["code"], entry["before"], entry["after"]] = entry["why"]
    return found


def sampled(files: dict[str, list[str]], short: bool, seed: int) -> Iterator[tuple[str, str, Mutant]]:
    """Yield file, source and mutant: one of each file in turn, so that a budget is spent evenly."""
    queues = {}
    for file in files:
        source = (ROOT / "src" / "dropmax" / file).read_text()
        all_of_it = mutants(source)
        random.Random(f"{seed} {file}").shuffle(all_of_it)
        limit = SHORT_SAMPLE if short else SAMPLE.get(file, SAMPLE_OTHERS)
        queues[file] = source, iter(all_of_it[:limit])
    while queues:
        for file, (source, queue) in list(queues.items()):
            mutant = next(queue, None)
            if mutant is None:
                del queues[file]
            else:
                yield file, source, mutant


def budget() -> float:
    """Return how many seconds the full form may take."""
    text = os.environ.get("HARDEN_MUTANTS_SECONDS", "1200")
    try:
        return float(text)
    except ValueError:
        raise InvalidValue(f"HARDEN_MUTANTS_SECONDS must be a number of seconds, got {text!r}") from None


def judge_all(
    files: dict[str, list[str]], kept: Path, short: bool, seed: int, scratch: Path, seconds: float, outcome: Outcome
) -> list[Verdict]:
    """Judge the sample, or as much of it as there is time for; return the verdicts."""
    end = time.monotonic() + seconds
    known = read_verdicts(kept)
    tests = {file: fingerprint_of_tests(names) for file, names in files.items()}
    sample = list(sampled(files, short, seed))
    found: list[Verdict] = []
    fair: set[str] = set()
    with progress("mutants", len(sample), "mutants") as advance, Worker(scratch) as worker, kept.open("a") as out:
        for file, source, mutant in sample:
            verdict = known.get((file, fingerprint(source), mutant.position))
            if verdict is not None and verdict.after != mutant.after:  # the kinds of mutants have changed since
                verdict = None
            if verdict is None or (verdict.verdict == "survived" and verdict.tests != tests[file]):
                if time.monotonic() > end:
                    continue
                if file not in fair:  # the tests must pass on what nobody changed
                    fair.add(file)
                    before = known.get((file, fingerprint(source), UNCHANGED))
                    if before is None or before.tests != tests[file]:
                        word, took = worker.judge(file, source, files[file], not short)
                        if word != "survived":
                            outcome.fail(f"{file}: its tests fail without any mutant: {worker.log.read_text()[-300:]}")
                            return found
                        about = (0, "", "", "")
                        verdict = Verdict(file, fingerprint(source), UNCHANGED, tests[file], *about, word, took)
                        print(json.dumps(verdict._asdict()), file=out, flush=True)
                word, took = worker.judge(file, mutant.source(), files[file], not short)
                code = source.splitlines()[mutant.line - 1].strip()
                about = (mutant.line, code, mutant.before, mutant.after)
                verdict = Verdict(file, fingerprint(source), mutant.position, tests[file], *about, word, took)
                print(json.dumps(verdict._asdict()), file=out, flush=True)
            found.append(verdict)
            advance(1)
    return found


def run(*, short: bool, seed: int, scratch: Path) -> Outcome:
    """Run the campaign."""
    outcome = Outcome()
    files = SHORT if short else TESTS
    kept = scratch / "mutants.jsonl" if short else VERDICTS
    kept.parent.mkdir(parents=True, exist_ok=True)
    verdicts = judge_all(files, kept, short, seed, scratch, budget(), outcome)
    report(verdicts, explanations(), outcome)
    outcome.details["mutants there are"] = {
        file: len(mutants((ROOT / "src" / "dropmax" / file).read_text())) for file in files
    }
    return outcome


def report(verdicts: list[Verdict], explained: dict[tuple[str, str, str, str], str], outcome: Outcome) -> None:
    """Count the verdicts and list the survivors."""
    by_file: dict[str, dict[str, int]] = {}
    for v in verdicts:
        word = v.verdict
        why = explained.get((v.file, v.code, v.before, v.after))
        if word == "survived" and why is not None:
            word = "survived, explained"
            outcome.details.setdefault("explained", []).append(f"{v.file}:{v.line}: {v.before} -> {v.after}: {why}")
        elif word == "survived":
            outcome.fail(f"{v.file}:{v.line}: {v.before} -> {v.after} in: {v.code}")
            outcome.details.setdefault("survivors", []).append(f"{v.file}:{v.line}: {v.before} -> {v.after}")
        outcome.count(word)
        counts = by_file.setdefault(v.file, {})
        counts[word] = counts.get(word, 0) + 1
    outcome.details["by file"] = by_file
