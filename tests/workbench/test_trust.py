"""Files of strangers: a network they name is imported only when trusted, and they cannot ask for a large one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import safetensors.torch

from dropmax.errors import InvalidValue, RunError
from dropmax.imports import check_import
from dropmax.workbench import networks
from dropmax.workbench.training import load_model, train
from tests.slow.hostile import MODULE, Ground, command, hostile_run
from tests.slow.malformed_runs import small_model, small_recipe


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory whose network is in a module within reach, and not imported."""
    ground = Ground.make(tmp_path)
    run = hostile_run(ground)
    monkeypatch.syspath_prepend(str(ground.folder / "modules"))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return run


def test_a_foreign_network_loads_once_it_is_imported_or_trusted(foreign: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"model\.safetensors would import the network .*--trust-network.*import it first"
    ):
        load_model(foreign)
    assert not (tmp_path / "mark").exists()
    assert load_model(foreign, trust_code=True).classes == ("a", "b")
    assert (tmp_path / "mark").exists()
    assert load_model(foreign).classes == ("a", "b")  # by now the program has imported it


def test_the_command_line_can_be_told_to_trust(foreign: Path, tmp_path: Path) -> None:
    code, said = command("predict", foreign, foreign.parent / "a.csv", "--format", "csv", "--trust-network")
    assert code == 0
    assert sum("a.csv:" in line for line in said.splitlines() if not line.startswith("dropmax:")) == 40


def test_a_recipe_of_the_users_own_is_his_word(foreign: Path, tmp_path: Path) -> None:
    """Training by a recipe that the user names imports its network without asking; so going on must ask."""
    out = tmp_path / "attacker" / "mine"
    code, said = command("train", "--recipe", foreign / "recipe.toml", "--out", out)
    assert code == 0, said
    assert (tmp_path / "mark").exists()
    (out / "model.safetensors").unlink()
    del sys.modules[MODULE]
    code, said = command("train", "--resume", out)
    assert code == 2
    assert "recipe.toml would import the network" in said
    code, said = command("train", "--resume", out, "--trust-network")
    assert code == 0, said


def test_networks_of_our_own_never_need_trust() -> None:
    for name in networks.NETWORKS:
        check_import("network", name, "a file", trust_code=False)
    with pytest.raises(RunError, match="would import the network 'nowhere:Net'"):
        check_import("network", "nowhere:Net", "a file", trust_code=False)
    check_import("network", "torch.nn:Flatten", "a file", trust_code=False)  # imported already


def test_a_small_file_cannot_ask_for_a_large_network(tmp_path: Path) -> None:
    state, about = small_model()
    about["recipe"]["network"]["hidden"] = [200_000, 200_000]  # 160 GB
    content = safetensors.torch.save(state, metadata={"dropmax": json.dumps(about)})
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(RunError, match="its tensors are not those of the network and head it names"):
        load_model(tmp_path)
    with pytest.raises(InvalidValue, match="at most 1202"):
        networks.make_network("cifar-resnet", (3, 32, 32), depth=6 * 10**9 + 2)


def test_training_into_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "door").symlink_to(tmp_path / "victim")
    recipe = small_recipe().override({"data.name": "mnist-1k", "data.train_size": 20, "data.validation_size": 20})
    for force in (False, True):
        with pytest.raises(RunError, match="door is not a directory"):
            train(recipe, tmp_path / "door", quiet=True, force=force)
    assert not list((tmp_path / "victim").iterdir())
