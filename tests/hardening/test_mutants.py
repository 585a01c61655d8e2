"""The campaign on mutants: which there are, that tests judge them, and that nothing is judged twice or lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dropmax.errors import DataError, InvalidValue
from hardening import mutants
from hardening.campaign import Outcome
from hardening.mutation import fingerprint
from hardening.mutation import mutants as mutants_of

SOURCE = '''"""A docstring of 1 line."""
__all__ = ["f"]
LIMIT: int = 3
def f(x: Tensor, n: int = 2) -> Tensor:
    """Return 1."""
    if n < LIMIT and not n:
        raise ValueError(f"n is {n + 1}")
    y = -x.detach() + n
    y += torch.maximum(x, y)[..., -1]
    return y
'''


def test_every_kind_of_mutant_and_none_of_words() -> None:
    found = {(m.line, m.before, m.after) for m in mutants_of(SOURCE)}
    assert found == {
        (3, "3", "4"),
        (3, "3", "2"),
        (4, "2", "3"),
        (4, "2", "1"),
        (6, "if n < LIMIT and (not n):", "if not (n < LIMIT and (not n)):"),
        (6, "n < LIMIT and (not n)", "n < LIMIT or not n"),
        (6, "n < LIMIT", "n <= LIMIT"),
        (6, "not n", "n"),
        (8, "-x.detach() + n", "-x.detach() - n"),
        (8, "-x.detach()", "x.detach()"),
        (8, "x.detach()", "x"),
        (9, "y += torch.maximum(x, y)[..., -1]", "y -= torch.maximum(x, y)[..., -1]"),
        (9, "y += torch.maximum(x, y)[..., -1]", "pass"),
        (9, "torch.maximum(x, y)", "torch.minimum(x, y)"),
        (9, "-1", "0"),
        (10, "return y", "return None"),
    }


def test_a_mutant_changes_one_thing_and_leaves_the_original_alone() -> None:
    everything = mutants_of(SOURCE)
    assert [m.position for m in everything] == list(range(len(everything)))
    sources = [m.source() for m in everything]
    assert len(set(sources)) == len(sources)
    unchanged = sources[0].replace("4", "3", 1).splitlines()
    for mutant, source in zip(everything, sources, strict=True):
        compile(source, "mutant", "exec")
        changed = [a for a, b in zip(source.splitlines(), unchanged, strict=True) if a != b]
        assert len(changed) == 1, mutant


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[mutants.Worker]:
    with mutants.Worker(tmp_path_factory.mktemp("mutants")) as started:
        yield started


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ("", "", "survived"),
        ("return (1 - label_smoothing) * nll", "return (1 + label_smoothing) * nll", "killed"),
        ("edge = torch.finfo(uniform.dtype).eps / 2", "edge = torch.finfo(uniform.dtype).eps / 3", "survived"),
        ("import math", "import mahts", "killed"),
        ("    logits = _from_highest(_wide(logits))", "    import os; os.abort()", "killed"),
    ],
)
def test_tests_judge_a_source(worker: mutants.Worker, before: str, after: str, verdict: str) -> None:
    source = (mutants.ROOT / "src/dropmax/functional.py").read_text()
    assert before in source
    changed = source.replace(before, after, 1) if before else source
    found, _ = worker.judge("functional.py", changed, ["test_functional.py::test_cross_entropy_is_torchs"], slow=False)
    assert found == verdict


def test_a_mutant_that_never_ends_is_killed_by_time(worker: mutants.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "SECONDS_PER_MUTANT", 1.0)
    tests = ["test_functional.py::test_cross_entropy_is_torchs"]
    assert worker.judge("functional.py", "while True: pass", tests)[0] == "killed by time"


def test_a_mistake_in_the_names_of_tests_is_no_verdict(worker: mutants.Worker) -> None:
    with pytest.raises(DataError, match=r"pytest ended with 4 on functional\.py"):
        worker.judge("functional.py", "", ["test_nothing_of_that_name.py"])


class Clerk:
    """Stands in for the worker: kills what has an even position, and remembers what it was asked."""

    asked: list[str]

    def __init__(self, scratch: Path) -> None:
        self.log = scratch / "log"
        self.log.write_text("")

    def __enter__(self) -> Clerk:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def judge(self, file: str, source: str, tests: list[str], slow: bool) -> tuple[str, float]:
        Clerk.asked.append(file)
        is_original = (mutants.ROOT / "src/dropmax" / file).read_text() == source
        return "survived" if is_original or len(Clerk.asked) % 2 else "killed", 0.1


def test_a_run_goes_on_where_the_last_one_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "Worker", Clerk)
    monkeypatch.setattr(mutants, "SHORT_SAMPLE", 4)
    kept = tmp_path / "verdicts.jsonl"
    files = {"heads/random_dropmax.py": ["heads/test_heads.py"], "functional.py": ["test_functional.py"]}

    def judge(seconds: float) -> list[mutants.Verdict]:
        Clerk.asked = []
        return mutants.judge_all(files, kept, True, 0, tmp_path, seconds, Outcome())

    assert judge(seconds=-1) == []
    first = judge(seconds=60)
    assert len(first) == 8
    assert len(Clerk.asked) == 10  # and each file once as it is
    kept.write_text(kept.read_text() + '{"file": "functi')  # killed while writing
    assert judge(seconds=60) == first
    assert Clerk.asked == []

    monkeypatch.setattr(mutants, "SHORT_SAMPLE", 5)
    assert len(judge(seconds=60)) == 10
    assert len(Clerk.asked) == 2  # the tests passed on what nobody changed: that is remembered
    monkeypatch.setattr(mutants, "SHORT_SAMPLE", 4)

    monkeypatch.setattr(mutants, "fingerprint_of_tests", lambda tests: "other tests")
    judge(seconds=60)
    survivors = sum(v.verdict == "survived" for v in first)
    assert 0 < survivors < 8
    assert len(Clerk.asked) == survivors + len({v.file for v in first if v.verdict == "survived"})


def test_tests_that_fail_without_a_mutant_are_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "Worker", Clerk)
    monkeypatch.setattr(Clerk, "judge", lambda *arguments: ("killed", 0.1))
    outcome = Outcome()
    mutants.judge_all(mutants.SHORT, tmp_path / "kept", True, 0, tmp_path, 60, outcome)
    assert "tests fail without any mutant" in outcome.failures[0]


def test_survivors_are_failures_unless_explained(tmp_path: Path) -> None:
    verdicts = [
        mutants.Verdict("f.py", "0", 0, "0", 3, "x = a + b", "a + b", "a - b", "survived", 1.0),
        mutants.Verdict("f.py", "0", 1, "0", 4, "y = 2", "2", "3", "survived", 1.0),
        mutants.Verdict("f.py", "0", 2, "0", 4, "y = 2", "2", "1", "killed", 1.0),
    ]
    toml = tmp_path / "survivors.toml"
    toml.write_text('[[survivor]]\nfile = "f.py"\ncode = "y = 2"\nbefore = "2"\nafter = "3"\nwhy = "nobody reads y"\n')
    outcome = Outcome()
    mutants.report(verdicts, mutants.explanations(toml), outcome)
    assert outcome.counts == {"survived": 1, "survived, explained": 1, "killed": 1}
    assert outcome.failures == ["f.py:3: a + b -> a - b in: x = a + b"]
    assert outcome.details["explained"] == ["f.py:4: 2 -> 3: nobody reads y"]
    toml.write_text('[[survivor]]\nfile = "f.py"\n')
    with pytest.raises(DataError, match="a survivor needs file, code, before, after and why"):
        mutants.explanations(toml)


def test_the_explained_survivors_are_mutants_there_are() -> None:
    """An explanation of a line that was changed explains nothing."""
    for file, code, before, after in mutants.explanations():
        source = (mutants.ROOT / "src/dropmax" / file).read_text()
        lines = source.splitlines()
        found = {(lines[m.line - 1].strip(), m.before, m.after) for m in mutants_of(source)}
        assert (code, before, after) in found, (file, code, before, after)


def test_every_file_of_the_formulas_has_tests() -> None:
    package = mutants.ROOT / "src/dropmax"
    files = {
        "functional.py",
        *(str(p.relative_to(package)) for d in ("exact", "heads") for p in (package / d).glob("*.py")),
    }
    assert files - set(mutants.TESTS) == {"heads/__init__.py", "heads/softmax.py"}  # which hold no formula
    for names in mutants.TESTS.values():
        assert all((mutants.ROOT / "tests" / name).exists() for name in names)


def test_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARDEN_MUTANTS_SECONDS", "a while")
    with pytest.raises(InvalidValue, match="HARDEN_MUTANTS_SECONDS must be a number of seconds, got 'a while'"):
        mutants.budget()


def test_short_form(tmp_path: Path) -> None:
    outcome = mutants.run(short=True, seed=0, scratch=tmp_path)
    assert outcome.failures == []
    assert outcome.tried == mutants.SHORT_SAMPLE
    (line, *_) = (tmp_path / "mutants.jsonl").read_text().splitlines()
    source = (mutants.ROOT / "src/dropmax/functional.py").read_text()
    assert json.loads(line)["fingerprint"] == fingerprint(source)
