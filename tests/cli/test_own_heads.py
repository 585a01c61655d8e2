"""A head of one's own through the commands: train, evaluate, predict, export, reproduce, studies, the estimator."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from dropmax.errors import RunError
from tests.heads.test_registry import CODE
from tests.slow.hostile import command

SMALL = ("--epochs", "1", "--set", "data.train_size=100", "--set", "data.validation_size=100")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "heads.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_train_evaluate_predict_and_export_with_consent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = command("train", "mnist-1k", "--head", "./heads.py:Focal", *SMALL)
    assert code == 0, said
    assert "runs/mnist-1k-heads.Focal-0 --trust-code" in said
    run = "runs/mnist-1k-heads.Focal-0"
    assert f'name = "{folder}/heads.py:Focal"' in Path(run, "recipe.toml").read_text()
    np.savez("some.npz", x=np.zeros((3, 1, 28, 28), np.uint8))
    monkeypatch.chdir(folder.parent)
    place = folder / run
    for arguments in (
        ("evaluate", place),
        ("predict", place, folder / "some.npz"),
        ("train", "--resume", place, "--epochs", "2"),
        ("export", place, "--format", "torch-export", "--out", folder / "out.pt2"),
        ("report", place, "--out", folder / "report.html"),
    ):
        for name in [name for name in sys.modules if name.startswith("dropmax_file_")]:
            del sys.modules[name]
        code, said = command(*arguments)
        assert code == 2, said
        assert "would import the head" in said
        assert "--trust-head" in said
        code, said = command(*arguments, "--trust-head")
        assert code == 0, said


def test_rows_of_a_table_and_of_a_study(folder: Path) -> None:
    from dropmax.lab.experiments import plan_study, plan_table

    groups = plan_table(["mnist-1k"], heads=["./heads.py:Focal", "softmax", "sigsoftmax"]).groups
    assert [group.variant for group in groups] == ["softmax", "sigsoftmax", "heads.Focal"]
    assert groups[-1].recipe.head["name"] == f"{folder}/heads.py:Focal"
    (folder / "study").mkdir()
    (folder / "study" / "heads.py").write_text(CODE)
    study = folder / "study" / "it.toml"
    study.write_text('[base]\ndata = "mnist-1k"\n[variants.own.head]\nname = "./heads.py:Focal"\ngamma = 1.0\n')
    with pytest.raises(RunError, match=r"would import '\./heads\.py:Focal' \(head\.name\)"):
        plan_study(study)
    (group,) = plan_study(study, trust_code=True).groups
    assert group.recipe.head == {"name": f"{folder}/study/heads.py:Focal", "gamma": 1.0}


def test_the_estimator(folder: Path) -> None:
    pytest.importorskip("sklearn")
    from sklearn.base import clone

    from dropmax.heads import find_head
    from dropmax.sklearn import DropMaxClassifier

    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    probs = [
        clone(DropMaxClassifier(head=head, max_iter=3, random_state=0)).fit(x, y).predict_proba(x)
        for head in ("./heads.py:Focal", find_head("./heads.py:Focal"))
    ]
    assert np.array_equal(*probs)
