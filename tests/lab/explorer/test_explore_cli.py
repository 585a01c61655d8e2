"""``dropmax explore`` as a user types it: it starts, says where it is, stops; mistakes end in one line."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
import webbrowser
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="needs FastAPI (the extra `explore`)")

from dropmax.lab.explorer import Explorer, server
from dropmax.workbench.data import load
from dropmax.workbench.recipes import Recipe, load_recipe
from dropmax.workbench.training import build, load_data, save_model
from tests.cli.asking import notes, refusal
from tests.command import dropmax
from tests.lab.explorer.small import make_explorer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with an untrained model of 14 x 14 images: nobody looks at its answers here."""
    folder = tmp_path_factory.mktemp("explore")
    pixels = np.random.default_rng(0).integers(0, 256, (90, 1, 14, 14), np.uint8)
    np.savez(folder / "mine.npz", x=pixels, y=np.arange(90) % 3)
    path = folder / "run"
    path.mkdir()
    recipe = load_recipe("own-images").override({"data.name": str(folder / "mine.npz"), "data.image_size": 0})
    network = {"name": "small-cnn", "widths": [4, 8]}
    recipe = Recipe(recipe.data, network, {"name": "dropmax"}, recipe.training)
    (path / "recipe.toml").write_text(recipe.to_toml())
    data = load_data(recipe)
    save_model(path / "model.safetensors", build(recipe, data.input_shape, 3), recipe, data)
    return path


def refused(words: str, *arguments: object) -> None:
    said = refusal("explore", *arguments)
    assert said.count("\n") == 1
    assert words in said


def test_it_starts_says_where_and_stops(run: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "dropmax", "explore", str(run), "--port", "0", "--no-browser", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("The explorer is at http://127.0.0.1:")
        with urllib.request.urlopen(line.split()[4] + "api/about") as response:
            assert b'"run":"run"' in response.read()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "Traceback" not in err
    assert sorted(os.listdir(run)) == ["model.safetensors", "recipe.toml"]  # it only ever reads


def test_a_warning_for_other_machines_and_a_browser_only_when_asked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[bool] = []
    opened: list[str] = []
    monkeypatch.setattr(Explorer, "open", lambda *_, **__: make_explorer(examples=3))
    monkeypatch.setattr(server, "serve", lambda app, bound: served.append(server.is_loopback(bound)))
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert "warning: listening on 0.0.0.0" in notes("explore", run, "--host", "0.0.0.0", "--port", 0)
    for option in ([], ["--no-browser"]):
        done = dropmax("explore", run, "--port", 0, *option)
        assert done.stdout.startswith("The explorer is at http://127.0.0.1:")
        assert done.stderr == ""
    assert served == [False, True, True]
    assert opened == []
    dropmax("explore", run, "--port", 0, "--open")
    assert len(opened) == 1


def test_mistakes_end_in_one_line(run: Path, tmp_path: Path) -> None:
    refused("there is no trained model at", tmp_path / "nothing", "--port", 0)
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / "recipe.toml").write_text((run / "recipe.toml").read_text())
    refused("has not ended", begun, "--port", 0)
    (begun / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem\n")
    refused("damaged", begun, "--port", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(f"cannot listen on port {port} of 127.0.0.1 (", run, "--port", port)
        refused("choose another with --port, or 0 for a free one", run, "--port", port)
    refused("--host", run, "--host", "no-such-host.invalid")


def test_a_run_without_its_data_is_one_line(tmp_path: Path) -> None:
    recipe = load_recipe("cifar-100")
    data = load("mnist-1k")
    network = {"name": "tutorial-cnn", "hidden": 8}
    recipe = Recipe(recipe.data, network, {"name": "softmax"}, recipe.training)
    save_model(tmp_path / "model.safetensors", build(recipe, data.input_shape, 10), recipe, data)
    refused("cifar-100", tmp_path, "--port", 0, "--data-dir", tmp_path / "empty")


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_the_missing_extra_is_named(run: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    import dropmax.lab.explorer

    for name in ("app", "server"):  # as if they had never been imported
        monkeypatch.delitem(sys.modules, f"dropmax.lab.explorer.{name}", raising=False)
        monkeypatch.delattr(dropmax.lab.explorer, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    refused('pip install "dropmax[explore]"', run, "--port", 0)
