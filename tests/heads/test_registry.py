"""Heads of one's own: registered, imported by name, announced by an installed package; and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import dropmax
from dropmax import HEADS, Head, Softmax, make_head, register_head, replace_head
from dropmax.errors import DropMaxError, InvalidType, InvalidValue, RunError
from dropmax.heads import find_head, findable_name
from dropmax.imports import check_import, import_name

CODE = """
import dropmax


class Focal(dropmax.Head):
    name = "own-focal"

    def __init__(self, in_features, num_classes, *, gamma=2.0, **shared):
        super().__init__(in_features, num_classes, **shared)
        self.gamma = gamma

    def terms(self, logits, target, noise):
        nll = self.cross_entropy(logits["classifier"], target)
        return {"focal": (1 - (-nll).exp()) ** self.gamma * nll}


class Nothing:
    pass
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module ``mine_heads`` within reach, not imported."""
    (tmp_path / "mine_heads.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("mine_heads", None)


@pytest.mark.parametrize("name", ["mine_heads:Focal", "./mine_heads.py:Focal"])
def test_a_head_by_where_it_is(mine: Path, name: str) -> None:
    head = make_head(name, 5, 4, gamma=3.0)
    features, target = torch.randn(6, 5), torch.randint(4, (6,))
    same = make_head("focal", 5, 4, gamma=3.0)
    same.load_state_dict(head.state_dict())
    torch.testing.assert_close(head.loss(features, target).total, same.loss(features, target).total)
    twin = make_head(**head.config())
    assert type(twin) is type(head)
    assert twin.config() == head.config()
    with pytest.raises(InvalidType, match=r"unknown option of own-focal 'gama': did you mean 'gamma'"):
        make_head(name, 5, 4, gama=3.0)


def test_a_registered_head_is_known_by_name_and_to_other_processes_by_its_place(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dropmax.heads.registry, "HEADS", HEADS)
    focal = find_head("mine_heads:Focal")
    monkeypatch.delitem(HEADS, "own-focal", raising=False)
    assert register_head(focal) is focal
    try:
        assert find_head("own-focal") is focal
        assert make_head("own-focal", 3, 4).config()["name"] == "own-focal"
        assert findable_name("own-focal") == "mine_heads:Focal"
        assert findable_name("dropmax") == "dropmax"
        assert findable_name("./a.py:B") == f"{mine}/a.py:B"
    finally:
        del HEADS["own-focal"]


def test_two_heads_under_one_name_are_refused_and_a_class_defined_again_is_not() -> None:
    def define(name: str, base: type[Head]) -> type[Head]:
        return type("Mine", (base,), {"name": name, "__module__": __name__})

    for taken in ("softmax", "focal", "dropmax-unmasked"):
        with pytest.raises(InvalidValue, match=rf"two heads are called '{taken}': dropmax.* and .*:Mine; give"):
            register_head(define(taken, Softmax))
    try:
        register_head(define("mine", Softmax))
        again = register_head(define("mine", Softmax))
        assert find_head("mine") is again
    finally:
        HEADS.pop("mine")


def test_what_is_no_head(mine: Path) -> None:
    for wrong in (Softmax(3, 4), nn.Linear, Head, 3, None):
        with pytest.raises(InvalidType, match=r"a head is a name such as 'dropmax' or a class deriving from dropmax"):
            find_head(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match=r"head 'mine_heads:Nothing' must be a class deriving from dropmax\.Head"):
        find_head("mine_heads:Nothing")
    with pytest.raises(InvalidValue, match=r"module 'mine_heads' has no 'Fokal'; did you mean 'Focal'"):
        find_head("mine_heads:Fokal")
    with pytest.raises(InvalidValue, match=r"is called 'a/b': a name has letters, digits"):
        register_head(type("Mine", (Softmax,), {"name": "a/b"}))
    with pytest.raises(InvalidValue, match=r"unknown head 'fokal': did you mean 'focal'\? .*package\.module:Class"):
        find_head("fokal")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("x = 1\nraise ValueError('no licence\\nfor this')", r"broken\.py, line 2: ValueError: no licence\)"),
        ("def f(:\n", r"broken\.py, line 1: SyntaxError: "),
        ("import nowhere_at_all", r"there is no module 'nowhere_at_all'; .*broken.* imports it: install it"),
        ("open('/nowhere/at/all')", r"broken\.py, line 1: FileNotFoundError: .*'/nowhere/at/all'"),
    ],
)
@pytest.mark.parametrize("name", ["broken:Head", "./broken.py:Head"])
def test_a_module_that_fails_to_import_has_its_own_word(mine: Path, name: str, code: str, says: str) -> None:
    (mine / "broken.py").write_text(code)
    with pytest.raises(InvalidValue, match=says):
        find_head(name)
    with pytest.raises(InvalidValue, match=r"there is no file \./gone\.py"):
        find_head("./gone.py:Head")


def test_an_installed_package_announces_heads(mine: Path) -> None:
    def install(package: str, *lines: str) -> None:
        place = mine / f"{package}-1.0.dist-info"
        place.mkdir()
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (place / "entry_points.txt").write_text("\n".join(["[dropmax.heads]", *lines]))

    install("first", "theirs = mine_heads:Focal", "none = mine_heads:Nothing", "softmax = mine_heads:Focal")
    assert find_head("theirs").name == "own-focal"
    assert find_head("softmax") is Softmax
    assert findable_name("theirs") == "theirs"
    with pytest.raises(InvalidType, match="must be a class deriving from"):
        find_head("none")
    with pytest.raises(InvalidValue, match=r"unknown head 'their': did you mean 'theirs'"):
        find_head("their")
    install("second", "theirs = other_heads:Focal")
    with pytest.raises(
        InvalidValue,
        match=r"two installed packages call a head 'theirs': mine_.*of first. and other_",
    ):
        find_head("theirs")


def test_a_file_may_not_have_a_head_imported_without_consent(mine: Path) -> None:
    for name in (*HEADS, "dropmax.heads:Softmax"):
        check_import("head", name, "a file", trust_code=False)
    with pytest.raises(RunError, match=r"would import the head 'mine_heads:Focal'.*--trust-head"):
        check_import("head", "mine_heads:Focal", "a file", trust_code=False)
    check_import("head", "mine_heads:Focal", "a file", trust_code=True)
    find_head("mine_heads:Focal")
    check_import("head", "mine_heads:Focal", "a file", trust_code=False)  # imported already


def test_classes_that_no_other_process_can_import() -> None:
    class Local(Softmax):
        pass

    assert import_name(Local) is None
    assert Local.name == "Local"
    assert Local(3, 4).config()["name"] == "Local"


def test_replace_head_takes_a_class_and_a_head_that_is_made_already() -> None:
    class Mine(Softmax):
        pass

    def net() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 6))
        model.fc = nn.Linear(6, 5)
        return model

    model = net()
    weight = model.get_submodule("fc").weight
    swapped = replace_head(model, Mine, label_smoothing=0.1)
    assert isinstance(swapped.head, Mine)
    assert swapped.head.label_smoothing == 0.1
    assert torch.equal(swapped.head.classifier.weight, weight)
    head = Mine(6, 3)
    assert replace_head(net(), head).head is head
    assert replace_head(net(), head, packed=True).get_submodule("fc").head is head
    with pytest.raises(DropMaxError, match=r"does not fit: the layer it would replace takes 6 features"):
        replace_head(net(), Mine(7, 3))
    for options in ({"label_smoothing": 0.1}, {"num_classes": 4}):
        with pytest.raises(DropMaxError, match=r"is made already: leave out (label_smoothing|num_classes)"):
            replace_head(net(), head, **options)
    with pytest.raises(InvalidType, match="a head is a name"):
        replace_head(net(), nn.Linear)  # type: ignore[call-overload]
