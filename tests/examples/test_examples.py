"""Each example learns, names rivals, writes nothing, and differs from the usual version by the lines it says."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Each example with what it needs, its number of classes, and the error it must stay below. Guessing errs on 90 % of
#: the digits and 83 % of the sentences; who knows what each name may be, but no context, errs on 31 % of the names.
NEEDS: dict[str, tuple[str | None, int, float]] = {
    "plain_pytorch": (None, 10, 0.2),
    "timm_model": (None, 10, 0.2),
    "skorch_net": ("skorch", 10, 0.25),
    "lightning_module": ("lightning", 10, 0.2),
    "huggingface_trainer": ("transformers", 6, 0.15),
    "huggingface_tokens": ("transformers", 4, 0.2),
}
COUNTS = {"Two": 2, "Three": 3, "Four": 4, "Five": 5}
WAS = re.compile(r"^(\s*)\S.*  # was: (.+)$")


@pytest.fixture(autouse=True)
def _quiet_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in an empty directory, which must stay empty; without telemetry; the environment is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    torch.set_num_threads(1)
    assert not list(tmp_path.iterdir()), "an example wrote into the working directory"


def source_of(name: str) -> str:
    return (EXAMPLES / f"{name}.py").read_text()


def undone(source: str) -> tuple[str, int]:
    """Return the usual version, and how many lines of the example differ from it."""
    lines, marked = [], 0
    for line in source.splitlines():
        was = WAS.match(line)
        marked += bool(was) or line.endswith("  # new")
        if was:
            lines.append(was[1] + was[2])
        elif not line.endswith("  # new"):
            lines.append(line)
    return "\n".join(lines) + "\n", marked


def run(name: str, source: str) -> ModuleType:
    package = NEEDS[name][0]
    if package is not None:
        pytest.importorskip(package, reason=f"examples/{name}.py needs {package}")
    module = ModuleType(name)
    exec(compile(source, str(EXAMPLES / f"{name}.py"), "exec"), module.__dict__)
    return module


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*NEEDS, "shared"}


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_learns_and_names_rivals(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, num_classes, highest_error = NEEDS[name]
    error, rivals = run(name, source_of(name)).main()
    assert set(error) == {"softmax", "dropmax"}
    assert max(error.values()) < highest_error
    assert len(rivals) >= 500
    assert any(rivals)
    assert not all(rivals), "an input that may be everything tells nothing"
    assert all(len(others) <= 2 and set(others) <= set(range(num_classes)) for others in rivals)
    printed = capsys.readouterr().out
    assert re.search(r"softmax +errs on \d+\.\d\d%", printed)
    assert re.search(r"dropmax +errs on \d+\.\d\d%", printed)
    assert "may be confused" in printed


@pytest.mark.parametrize("name", NEEDS)
def test_an_example_is_a_script_whose_docstring_counts_the_lines_that_differ(name: str) -> None:
    source = source_of(name)
    assert source.endswith('if __name__ == "__main__":\n    main()\n')
    assert f"    python examples/{name}.py\n" in source
    said = re.search(r"^(\w+) lines differ from the usual version", source, re.MULTILINE)
    assert said is not None
    usual, marked = undone(source)
    assert COUNTS[said[1]] == marked
    trained = re.split(r"^def (?:predict_proba|main)\b", usual.split('"""')[2], flags=re.MULTILINE)[0]
    assert "dropmax." not in trained, "a line that uses dropmax is not marked"


@pytest.mark.parametrize("name", NEEDS)
def test_with_the_marks_undone_it_is_an_ordinary_softmax_classifier(name: str) -> None:
    usual = run(name, undone(source_of(name))[0])
    shorten(usual)
    model, _ = usual.train("softmax")
    modules = list(getattr(model, "module_", model).modules())
    assert not any(type(module).__module__.startswith("dropmax") for module in modules)
    last = [module for module in modules if isinstance(module, nn.Linear)][-1]
    assert last.out_features == NEEDS[name][1]


def shorten(example: ModuleType) -> None:
    """Leave fifty rows to train on: that it runs is enough."""
    for name in ("train_x", "train_y", "train_set", "test_set"):
        if name in vars(example):
            setattr(example, name, getattr(example, name)[:50])


def test_the_stand_in_keeps_the_promises_of_timm() -> None:
    stand_in: Any = importlib.import_module("shared")
    model = stand_in.create_model("any", num_classes=1000, in_chans=1)
    x = torch.randn(2, 1, 28, 28)
    assert model(x).shape == (2, 1000)
    model.reset_classifier(10)
    assert model(x).shape == (2, 10)
    assert model.forward_head(model.forward_features(x), pre_logits=True).shape == (2, model.num_features)
    model.reset_classifier(0)
    assert model(x).shape == (2, model.num_features)
