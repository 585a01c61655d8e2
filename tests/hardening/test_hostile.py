"""The campaign of hostile files: it passes, and it notices when an attack works."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from dropmax.errors import InvalidValue, RunError
from dropmax.workbench.networks import registry
from dropmax.workbench.training import load_model, train, trained
from hardening import hostile, hostile_code, hostile_places, hostile_text
from hardening.campaign import Outcome
from hardening.hostile import Ground


def test_no_attack_works(tmp_path: Path) -> None:
    outcome = hostile.run(short=True, seed=0, scratch=tmp_path)
    assert outcome.failures == []
    assert outcome.tried == len(outcome.details["attacks"]) > 70
    assert set(outcome.counts) == {"refused", "neutralised"}


def attacked(name: str, attack: hostile.Attack, tmp_path: Path) -> list[str]:
    outcome = Outcome()
    hostile.attack_all(outcome, {name: attack}, tmp_path)
    assert outcome.tried == 1
    assert bool(outcome.failures) == ("broken" in outcome.counts)
    return outcome.failures


def test_code_that_runs_is_noticed(tmp_path: Path) -> None:
    def believes(ground: Ground) -> str:
        pickle.loads(hostile.payloads(ground.mark)["nested"])
        return "neutralised"

    assert attacked("it", believes, tmp_path) == ["it: hostile code ran"]


def test_a_victim_that_is_touched_is_noticed(tmp_path: Path) -> None:
    def writes(ground: Ground) -> str:
        (ground.victim / "diary.txt").write_text("pwned")
        (ground.victim.parent / "elsewhere").touch()
        return "refused"

    assert attacked("it", writes, tmp_path) == [
        "it: the victim's files were changed", "it: 'elsewhere' was written outside",
    ]  # fmt: skip
    assert attacked("it", lambda ground: 1 / 0, tmp_path)[0].startswith("it: ZeroDivisionError")  # type: ignore[arg-type,return-value]


def test_a_network_that_is_imported_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "check_import", lambda *arguments: None)
    name = "a network to import, through load_model"
    assert "it: hostile code ran" in attacked("it", hostile_code.attacks(True)[name], tmp_path)


def test_an_archive_that_is_believed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tarfile

    def careless(archive: Path, folder: str, target: Path, limit: int) -> Path:
        with tarfile.open(archive) as opened:
            opened.extractall(target, filter="fully_trusted")
        return target / folder

    monkeypatch.setattr(hostile_places, "unpack", careless)
    attack = hostile_places.attacks()["an archive (.tar) with an absolute path"]
    assert "it: the victim's files were changed" in attacked("it", attack, tmp_path)


def test_raw_escapes_and_live_pages_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dropmax.cli

    monkeypatch.setattr(dropmax.cli, "printable", str)
    attack = hostile_text.attacks(True)["a terminal escape in the name of a run"]
    assert attacked("it", attack, tmp_path) == ["it: '\\x1b]0;pwned' was printed raw"]
    page = hostile_text._Page(
        "<p onclick=x><a href=' java\nscript:1'>x</a><img src='data:image/png'></p><script></script>"
    )
    assert page.live == ["p onclick=x", "a href= java\nscript:1", "script"]


@pytest.mark.parametrize("name", ["rich markup", "bytes that are no text", "a line of its own"])
def test_names_that_once_got_through(name: str, tmp_path: Path) -> None:
    """A bracket made rich raise, half a character made print raise, and a line break in a CSV cell began a line."""
    attack = hostile_text.attacks(False)[f"{name} in the names of images and classes"]
    assert attacked("it", attack, tmp_path) == []


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory whose network is in a module within reach, and not imported."""
    ground = Ground.make(tmp_path)
    run = hostile_code.hostile_run(ground)
    monkeypatch.syspath_prepend(str(ground.folder / "modules"))
    monkeypatch.delitem(sys.modules, hostile_code.MODULE, raising=False)
    return run


def test_a_foreign_network_loads_once_it_is_imported_or_trusted(foreign: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"model\.safetensors would import the network .*--trust-network.*import it first"
    ):
        load_model(foreign)
    assert not (tmp_path / "mark").exists()
    assert load_model(foreign, trust_network=True).classes == ("a", "b")
    assert (tmp_path / "mark").exists()
    assert load_model(foreign).classes == ("a", "b")  # by now the program has imported it


def test_the_command_line_can_be_told_to_trust(foreign: Path, tmp_path: Path) -> None:
    code, said = hostile.command("predict", foreign, foreign.parent / "a.csv", "--format", "csv", "--trust-network")
    assert code == 0
    assert len(said.splitlines()) == 41


def test_a_recipe_of_the_users_own_is_his_word(foreign: Path, tmp_path: Path) -> None:
    """Training by a recipe that the user names imports its network without asking; so going on must ask."""
    out = tmp_path / "attacker" / "mine"
    code, said = hostile.command("train", "--recipe", foreign / "recipe.toml", "--out", out)
    assert code == 0, said
    assert (tmp_path / "mark").exists()
    (out / "model.safetensors").unlink()
    del sys.modules[hostile_code.MODULE]
    code, said = hostile.command("train", "--resume", out)
    assert code == 1
    assert "recipe.toml would import the network" in said
    code, said = hostile.command("train", "--resume", out, "--trust-network")
    assert code == 0, said
    code, said = hostile.command("train", "mnist-1k", "--trust-network")
    assert (code, "--trust-network goes with --resume" in said) == (1, True)


def test_networks_of_our_own_never_need_trust() -> None:
    for name in registry.NETWORKS:
        registry.check_import(name, "a file", trust_network=False)
    with pytest.raises(RunError, match="would import the network 'nowhere:Net'"):
        registry.check_import("nowhere:Net", "a file", trust_network=False)
    registry.check_import("torch.nn:Flatten", "a file", trust_network=False)  # imported already


def test_a_small_file_cannot_ask_for_a_large_network(tmp_path: Path) -> None:
    import json

    import safetensors.torch

    from hardening.run_files import _model

    state, about = _model()
    about = json.loads(json.dumps(about))
    about["recipe"]["network"]["hidden"] = [200_000, 200_000]  # 160 GB
    content = safetensors.torch.save(state, metadata={"dropmax": json.dumps(about)})
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(RunError, match="its tensors are not those of the network and head it names"):
        load_model(tmp_path)
    for options, says in (
        ({"depth": 6 * 10**9 + 2}, "at most 1202"),
        ({"depth": 20, "widths": [1, 1]}, "three widths"),
    ):
        with pytest.raises(InvalidValue, match=says):
            registry.make_network("cifar-resnet", (3, 32, 32), **options)


def test_training_into_a_link_is_refused(tmp_path: Path) -> None:
    from hardening.run_files import small_recipe

    (tmp_path / "victim").mkdir()
    (tmp_path / "door").symlink_to(tmp_path / "victim")
    recipe = small_recipe().override({"data.name": "mnist-1k", "data.train_size": 20, "data.validation_size": 20})
    with pytest.raises(RunError, match="door is not a directory"):
        train(recipe, tmp_path / "door", quiet=True)
    assert not list((tmp_path / "victim").iterdir())
